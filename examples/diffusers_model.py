"""A Diffusers model on flashtile: its attention is torch's, so torch's switch is all it takes.

The model is a small U-Net with random weights; it must give what it gives on torch's own kernels.
"""

from __future__ import annotations

import sys

import torch

import flashtile

try:
    from diffusers import UNet2DConditionModel
except ImportError:
    print("this example needs Diffusers: pip install 'flashtile[diffusers]'")
    sys.exit()


def main() -> None:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=32, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
    ).eval()  # fmt: skip
    latents, words = torch.randn(2, 4, 32, 32), torch.randn(2, 20, 32)
    with torch.no_grad():
        expected = model(latents, 10, words).sample
        with flashtile.activated():
            found = model(latents, 10, words).sample
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    print(f"{tuple(found.shape)}: largest difference {float((found - expected).abs().max()):.1e}")


if __name__ == "__main__":
    main()
