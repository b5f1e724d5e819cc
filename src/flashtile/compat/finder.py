"""``import flash_attn`` finds flashtile: for code that cannot be edited."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = "2.8.4+flashtile"  # the flash-attn whose interface this is

# What there is under the name flash_attn, and where it comes from.
_SOURCES = {
    "flash_attn": ("flashtile.compat.flash_attn",),
    "flash_attn.bert_padding": ("flashtile.compat.bert_padding",),
    "flash_attn.flash_attn_interface": ("flashtile.compat.flash_attn", "flashtile.compat.passes"),
    "flash_attn.layers": ("flashtile.compat.layers",),
    "flash_attn.layers.rotary": ("flashtile.compat.layers.rotary",),
}
_PACKAGES = ("flash_attn", "flash_attn.layers")


def install(force: bool = False) -> None:
    """From now on ``import flash_attn`` finds ``flashtile.compat``, in this process; once is enough.

    There are ``flash_attn``, ``flash_attn.flash_attn_interface``, ``flash_attn.bert_padding`` and
    ``flash_attn.layers.rotary``, and the metadata of a distribution flash-attn; its version is
    "2.8.4+flashtile". Other modules and names of flash-attn raise ImportError, as if they were not installed.
    Call it before the code that looks for flash-attn is imported: many libraries look once, and remember.

    Args:
        force: shadow a flash-attn that is installed; what was imported from it stays what it was.

    Raises:
        RuntimeError: another ``flash_attn`` can be imported, and not ``force``.
    """
    with _lock:
        if _finder in sys.meta_path:
            return
        if not force and (place := _another()):
            raise RuntimeError(
                f"flash_attn is installed ({place}): flashtile.compat.install(force=True) shadows it"
            )
        for name in _loaded():
            _shadowed[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, _finder)
        importlib.invalidate_caches()


def uninstall() -> None:
    """Undo :func:`install`; a flash-attn that was shadowed is found again. What was imported stays."""
    with _lock:
        if _finder not in sys.meta_path:
            return
        sys.meta_path.remove(_finder)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(_shadowed)
        _shadowed.clear()


class _Finder(MetaPathFinder):
    """Finds the modules of ``_SOURCES``, and the distribution they seem to come from."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        sources = _SOURCES.get(fullname)
        if sources is None:
            return None
        spec = importlib.util.find_spec(sources[0])
        assert spec is not None
        return importlib.util.spec_from_loader(
            fullname, _Loader(sources), origin=spec.origin, is_package=fullname in _PACKAGES
        )

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterator[importlib.metadata.Distribution]:
        name = context.name
        if name is None or name.lower().replace("_", "-").replace(".", "-") == "flash-attn":
            yield _Distribution()


class _Loader(Loader):
    """Fills a module with what the modules ``sources`` offer."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = sources

    def exec_module(self, module: ModuleType) -> None:
        names = vars(module)
        modules = [importlib.import_module(source) for source in self._sources]
        for source in reversed(modules):
            names.update({name: getattr(source, name) for name in source.__all__})
            names.update(__all__=source.__all__, __doc__=source.__doc__, __file__=source.__file__)
            if hasattr(source, "__getattr__"):
                names["__getattr__"] = source.__getattr__
        if module.__name__ == "flash_attn":
            names["__version__"] = VERSION


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata tells about the distribution flash-attn."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            summary = "flashtile, under the name of flash-attn"
            return f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\nSummary: {summary}\n"
        return "flash_attn\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


_lock = threading.RLock()
_finder = _Finder()
_shadowed: dict[str, ModuleType] = {}


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "flash_attn"]


def _another() -> str | None:
    """Where the ``flash_attn`` is that would be imported now, None if there is none."""
    module = sys.modules.get("flash_attn")
    if module is not None:
        return getattr(module, "__file__", None) or "already imported"
    spec = importlib.util.find_spec("flash_attn")
    if spec is None:
        return None
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or "of unknown origin"
