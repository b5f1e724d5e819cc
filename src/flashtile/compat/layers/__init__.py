"""The part of ``flash_attn.layers`` that attention needs."""

__all__: list[str] = []
