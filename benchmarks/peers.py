"""The libraries that are measured, one class each: `prepare(case)` gives the call to be timed.

A call returns the output (B, H, S, D) or, for a backward case, the gradients of query, key and value.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashtile.bench import machine, runs
from flashtile.bench.cases import Case

Run = Callable[[], Any]
NUMPY_DTYPES = {"fp32": np.float32, "fp16": np.float16}


class LeftOutError(Exception):
    """This library cannot do this case; the message says why."""


class Torch:
    """flashtile, torch's SDPA or standard attention, through torch's autograd."""

    def __init__(self, library: str, threads: int) -> None:
        self.library = library
        torch.set_num_threads(threads)

    def prepare(self, case: Case) -> Run:
        reason = runs.left_out(self.library, case, machine.memory_bytes(), patient=True)
        if reason:
            raise LeftOutError(reason)
        return runs.make_run(runs.LIBRARIES[self.library](case), case)


class Flex:
    """torch's FlexAttention, compiled by inductor, which needs a C++ compiler."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def prepare(self, case: Case) -> Run:
        if case.direction == "backward":
            raise LeftOutError("FlexAttention has no backward pass on CPUs")
        if not shutil.which(os.environ.get("CXX", "g++")):
            raise LeftOutError("no C++ compiler for torch.compile")
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        query, key, value, _ = case.inputs()
        mask = None
        if case.causal:
            sizes = (case.query_length, case.keys)
            mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, *sizes, device="cpu")
        attention = torch.compile(flex_attention, dynamic=False)

        def run() -> Tensor:
            with torch.no_grad():
                return attention(query, key, value, block_mask=mask, enable_gqa=case.groups > 1)

        return run


class OnnxRuntime:
    """One operator of onnxruntime as a graph of its own, with inputs and outputs bound once."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def prepare(self, case: Case) -> Run:
        if case.direction == "backward":
            raise LeftOutError("onnxruntime has no backward pass")
        if case.dtype not in NUMPY_DTYPES:
            raise LeftOutError("onnxruntime has no bfloat16 kernel on CPUs")
        query, key, value, _ = case.inputs()
        return self.bind(case, *(tensor.numpy() for tensor in (query, key, value)))

    def bind(self, case: Case, query: Any, key: Any, value: Any) -> Run:
        raise NotImplementedError

    def session(self, node: Any, inputs: dict[str, Any], outputs: list[str], case: Case) -> Any:
        import onnx
        import onnxruntime

        kinds = {np.dtype(np.float32): 1, np.dtype(np.float16): 10, np.dtype(np.int32): 6}
        value = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [node],
            "attention",
            [value(name, kinds[array.dtype], array.shape) for name, array in inputs.items()],
            [value(name, kinds[np.dtype(NUMPY_DTYPES[case.dtype])], None) for name in outputs],
        )
        opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def bound(self, session: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> tuple[Any, Run]:
        import onnxruntime

        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for name, array in outputs.items():
            if array is None:
                binding.bind_output(name)
            else:
                binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        return binding, lambda: session.run_with_iobinding(binding)


def rows_of(array: Any) -> Any:
    """(B, H, S, D) as (B, S, H * D)."""
    batch, heads, length, head_dim = array.shape
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(batch, length, heads * head_dim)


def heads_of(array: Any, heads: int) -> Any:
    """(B, S, H * D) as (B, H, S, D)."""
    batch, length, width = array.shape
    return array.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


class OnnxMultiHead(OnnxRuntime):
    """com.microsoft.MultiHeadAttention."""

    def bind(self, case: Case, query: Any, key: Any, value: Any) -> Run:
        import onnx

        if case.groups > 1:
            raise LeftOutError("MultiHeadAttention has no grouped heads")
        inputs = {"query": rows_of(query), "key": rows_of(key), "value": rows_of(value)}
        node = onnx.helper.make_node(
            "MultiHeadAttention",
            list(inputs),
            ["output"],
            domain="com.microsoft",
            num_heads=case.heads,
            unidirectional=int(case.causal),
        )
        binding, run = self.bound(self.session(node, inputs, ["output"], case), inputs, {"output": None})
        return lambda: (run(), binding.get_outputs()[0])[1]

    @staticmethod
    def output(result: Any, case: Case) -> Tensor:
        return torch.from_numpy(heads_of(result.numpy(), case.heads))


class OnnxGroupQuery(OnnxRuntime):
    """com.microsoft.GroupQueryAttention, which is always causal; decoding appends to a shared cache."""

    def bind(self, case: Case, query: Any, key: Any, value: Any) -> Run:
        import onnx

        decode = case.query_length == 1
        if not case.causal and not decode:
            raise LeftOutError("GroupQueryAttention is always causal")
        new = slice(-case.query_length, None)
        inputs = {"query": rows_of(query), "key": rows_of(key[:, :, new]), "value": rows_of(value[:, :, new])}
        caches = {"past_key": key, "past_value": value} if decode else {}
        sizes = {
            "seqlens_k": np.full(case.batch, case.keys - 1, np.int32),
            "total_sequence_length": np.array([case.keys], np.int32),
        }
        outputs = ["output", "present_key", "present_value"]
        node = onnx.helper.make_node(
            "GroupQueryAttention",
            [*inputs, *(caches or ("", "")), *sizes],
            outputs,
            domain="com.microsoft",
            num_heads=case.heads,
            kv_num_heads=case.kv_heads or case.heads,
        )
        session = self.session(node, inputs | caches | sizes, outputs, case)
        binding, run = self.bound(session, inputs | sizes, {"output": None})
        self._bind_caches(binding, caches)
        return lambda: (run(), binding.get_outputs()[0])[1]

    @staticmethod
    def _bind_caches(binding: Any, caches: dict[str, Any]) -> None:
        import onnxruntime

        for name in ("key", "value"):
            if caches:
                shared = onnxruntime.OrtValue.ortvalue_from_numpy(caches[f"past_{name}"])
                binding.bind_ortvalue_input(f"past_{name}", shared)
                binding.bind_ortvalue_output(f"present_{name}", shared)
            else:
                binding.bind_output(f"present_{name}")

    output = staticmethod(OnnxMultiHead.output)


class OnnxAttention(OnnxRuntime):
    """The Attention operator of ONNX opset 23."""

    def bind(self, case: Case, query: Any, key: Any, value: Any) -> Run:
        import onnx

        inputs = {"query": query, "key": key, "value": value}
        node = onnx.helper.make_node("Attention", list(inputs), ["output"], is_causal=int(case.causal))
        binding, run = self.bound(self.session(node, inputs, ["output"], case), inputs, {"output": None})
        return lambda: (run(), binding.get_outputs()[0])[1]

    @staticmethod
    def output(result: Any, case: Case) -> Tensor:
        return torch.from_numpy(result.numpy())


class OpenVino:
    """OpenVINO's ScaledDotProductAttention with its precision hint set to the case's dtype."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def prepare(self, case: Case) -> Run:
        if case.direction == "backward":
            raise LeftOutError("OpenVINO has no backward pass")
        import openvino
        from openvino import opset13

        kind = {"fp32": openvino.Type.f32, "bf16": openvino.Type.bf16, "fp16": openvino.Type.f16}[case.dtype]
        query, key, value, _ = case.inputs()
        # heads of a group become rows of one key head: the operator itself has no groups
        query = query.reshape(*key.shape[:2], -1, case.head_dim) if case.groups > 1 else query
        parameters = [opset13.parameter(list(tensor.shape), kind) for tensor in (query, key, value)]
        attention = opset13.scaled_dot_product_attention(*parameters, causal=case.causal)
        compiled = openvino.Core().compile_model(
            openvino.Model([attention], parameters),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": self.threads,
                "INFERENCE_PRECISION_HINT": kind.to_string(),
                "PERFORMANCE_HINT": "LATENCY",
            },
        )
        request = compiled.create_infer_request()
        self.kept = [self._array(tensor) for tensor in (query, key, value)]
        for number, array in enumerate(self.kept):
            shape = openvino.Shape(list(parameters[number].shape))
            request.set_input_tensor(number, openvino.Tensor(array, shape, kind))
        return lambda: (request.infer(), request.get_output_tensor())[1]

    @staticmethod
    def _array(tensor: Tensor) -> Any:
        return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    @staticmethod
    def output(result: Any, case: Case) -> Tensor:
        out = torch.from_numpy(result.data.copy())
        if case.dtype == "bf16":  # which NumPy lacks: the same bits come as float16
            out = out.view(torch.bfloat16)
        return out.reshape(case.batch, case.heads, case.query_length, case.head_dim)


PEERS: dict[str, Callable[[int], Any]] = {
    "flashtile": lambda threads: Torch("flashtile", threads),
    "torch": lambda threads: Torch("torch", threads),
    "standard": lambda threads: Torch("standard", threads),
    "flex": Flex,
    "ort-mha": OnnxMultiHead,
    "ort-gqa": OnnxGroupQuery,
    "ort-attention": OnnxAttention,
    "openvino": OpenVino,
}
TITLES = {
    "flashtile": "flashtile",
    "torch": "torch SDPA",
    "standard": "standard (torch)",
    "flex": "FlexAttention",
    "ort-mha": "onnxruntime MHA",
    "ort-gqa": "onnxruntime GQA",
    "ort-attention": "ONNX Attention-23",
    "openvino": "OpenVINO SDPA",
}
