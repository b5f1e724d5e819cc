"""install(): ``import flash_attn`` finds flashtile, and a real one is left alone unless asked otherwise.

What is imported stays imported, so every case runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(code: str, *, path: Path | None = None) -> str:
    """Standard output of ``code`` in a new process; ``path`` is one more place to import from."""
    start = "" if path is None else f"import sys; sys.path.insert(0, {str(path)!r})\n"
    command = [sys.executable, "-W", "error", "-c", start + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """A folder with a flash_attn of its own."""
    package = tmp_path / "flash_attn"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "__version__ = '1.0'\ndef flash_attn_func(): return 'the other one'\n"
    )
    (package / "ops" / "__init__.py").write_text("")
    return tmp_path


def test_importing_flashtile_offers_nothing():
    run("""
        import importlib.util, sys
        import flashtile, flashtile.compat, flashtile.compat.flash_attn, flashtile.compat.bert_padding
        assert importlib.util.find_spec("flash_attn") is None
        assert not any(name.startswith("flash_attn") for name in sys.modules)
        flashtile.compat.uninstall()
    """)


def test_code_for_flash_attn_finds_everything_it_usually_imports():
    run("""
        import importlib, importlib.metadata, importlib.util
        from flashtile import compat
        compat.install()
        compat.install()
        import flash_attn
        import flash_attn.flash_attn_interface
        from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func
        from flash_attn import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
        from flash_attn import flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache, __version__
        from flash_attn.flash_attn_interface import flash_attn_func as same
        from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.bert_padding import unpad_input_for_concatenated_sequences, index_put_first_axis
        from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_func, apply_rotary_emb_qkv_
        from flash_attn import *

        assert flash_attn_func is same is compat.flash_attn.flash_attn_func
        assert flash_attn.__version__ == __version__ == importlib.metadata.version("flash_attn")
        assert importlib.metadata.version("flash-attn") == __version__
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert importlib.metadata.metadata("flash_attn")["Name"] == "flash-attn"
        assert flash_attn.__spec__.name == "flash_attn" and flash_attn.__file__.endswith("flash_attn.py")
        assert importlib.util.find_spec("flash_attn.bert_padding").origin.endswith("bert_padding.py")
        assert importlib.reload(flash_attn) is flash_attn
        found = importlib.metadata.distributions(name="flash-attn")
        assert [distribution.metadata["Name"] for distribution in found] == ["flash-attn"]
        assert importlib.metadata.version("torch")
    """)


def test_versions_compare_as_those_of_flash_attn_2():
    run("""
        from flashtile.compat import install
        install()
        import flash_attn
        from packaging.version import parse
        assert parse("2.8.3") <= parse(flash_attn.__version__) < parse("2.9")
        assert flash_attn.__version__ >= "2.7.4" and flash_attn.__version__.split(".")[0] == "2"
    """)


def test_what_is_not_offered_raises_import_error():
    run("""
        import importlib, importlib.util
        from flashtile.compat import install
        install()
        for name in ("flash_attn.ops", "flash_attn.ops.triton.rotary", "flash_attn.modules.mha",
                     "flash_attn.losses.cross_entropy", "flash_attn.cute", "flash_attn_2_cuda",
                     "flash_attn_interface"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert error.name in name and "flash_attn" in str(error)
            else:
                raise AssertionError(name)
        assert importlib.util.find_spec("flash_attn.cute") is None  # torch and others look like this

        for code in ("from flash_attn import flash_attn_unpadded_func",
                     "from flash_attn.flash_attn_interface import flash_attn_gpu",
                     "from flash_attn.bert_padding import IndexFirstAxis",
                     "from flash_attn.layers.rotary import RotaryEmbedding"):
            try:
                exec(code)
            except ImportError as error:
                assert code.split()[-1] in str(error) and "flashtile" in str(error), error
            else:
                raise AssertionError(code)
        import flash_attn
        assert not hasattr(flash_attn, "flash_attn_unpadded_func")
    """)


def test_rearrange_is_einops():
    pytest.importorskip("einops")
    run("""
        from flashtile.compat import install
        install()
        from flash_attn.bert_padding import rearrange
        import einops
        assert rearrange is einops.rearrange
    """)


def test_a_real_one_is_not_shadowed(another):
    run(
        """
        from flashtile.compat import install, uninstall
        for imported in (False, True):
            try:
                install()
            except RuntimeError as error:
                assert "__init__.py" in str(error) and "force=True" in str(error)
            else:
                raise AssertionError
            import flash_attn
            assert flash_attn.flash_attn_func() == "the other one"
        uninstall()
        assert flash_attn.flash_attn_func() == "the other one"
    """,
        path=another,
    )


@pytest.mark.parametrize("imported", [False, True])
def test_force_shadows_it_until_uninstalled(another, imported):
    run(
        f"""
        import importlib, importlib.util, sys
        from flashtile.compat import install, uninstall
        if {imported}:
            import flash_attn.ops
            real = flash_attn
        install(force=True)
        install()
        import flash_attn
        assert flash_attn.__version__ != "1.0"
        assert flash_attn.flash_attn_func.__module__ == "flashtile.compat.flash_attn"
        assert importlib.util.find_spec("flash_attn.ops") is None
        from flash_attn import bert_padding
        uninstall()
        uninstall()
        assert "flash_attn.bert_padding" not in sys.modules
        import flash_attn
        assert flash_attn.flash_attn_func() == "the other one"
        if {imported}:
            assert flash_attn is real and "flash_attn.ops" in sys.modules
        import flash_attn.ops
    """,
        path=another,
    )


def test_uninstall_leaves_no_trace():
    run("""
        import importlib.metadata, importlib.util, sys
        before = list(sys.meta_path)
        from flashtile.compat import install, uninstall
        install()
        import flash_attn, flash_attn.layers.rotary
        function = flash_attn.flash_attn_func
        uninstall()
        assert sys.meta_path == before
        assert importlib.util.find_spec("flash_attn") is None
        try:
            importlib.metadata.version("flash_attn")
        except importlib.metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError
        import torch
        assert function(*torch.randn(3, 1, 4, 2, 8)).shape == (1, 4, 2, 8)  # who has it keeps it
        install()
        import flash_attn
        assert flash_attn.flash_attn_func is function
    """)


def test_a_blocked_import_is_no_installation():
    run("""
        import sys
        from flashtile.compat import install, uninstall
        sys.modules["flash_attn"] = None
        install()
        import flash_attn
        uninstall()
        assert sys.modules["flash_attn"] is None
    """)
