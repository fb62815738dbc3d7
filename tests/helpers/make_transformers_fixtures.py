# SPDX-License-Identifier: Apache-2.0
"""Writes the checkpoints of tests/models/data: tiny models that transformers saved, and logits.

Run by hand, where transformers is installed; the tests read the files and need none. The files
there were made with transformers 5.24.0 and torch 2.13.0.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 37, "state_size": 4}
FIXTURES = {
    # In shards, tied, every default.
    "mamba-sharded": (MambaConfig, MambaForCausalLM, torch.float32, "9KB", {}),
    # Everything that differs from the defaults.
    "mamba-options": (
        *(MambaConfig, MambaForCausalLM, torch.bfloat16, "1GB"),
        {
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
            "time_step_rank": 3,
            "intermediate_size": 20,
            "conv_kernel": 3,
            "residual_in_fp32": False,
            "layer_norm_epsilon": 1e-3,
            "eos_token_id": [1, 2],
            "bos_token_id": None,
        },
    ),
    "falcon-mamba": (
        *(FalconMambaConfig, FalconMambaForCausalLM, torch.float32, "1GB"),
        {"mixer_rms_eps": 1e-3, "use_conv_bias": True},
    ),
}


def main() -> None:
    """Write every fixture."""
    for seed, (name, row) in enumerate(FIXTURES.items()):
        config_cls, model_cls, dtype, shard, options = row
        torch.manual_seed(seed)
        model = model_cls(config_cls(**SIZES, **options)).eval()
        with torch.no_grad():
            # transformers begins with zero biases and norms of one, which would hide mistakes.
            for key, parameter in model.named_parameters():
                if "norm" in key or key.endswith("D"):
                    parameter.add_(0.3 * torch.randn_like(parameter))
                elif "bias" in key and "dt_proj" not in key:
                    parameter.normal_(std=0.5)
        folder = Path(__file__).parents[1] / "models" / "data" / name
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
        (folder / "generation_config.json").unlink()
        input_ids = torch.randint(0, SIZES["vocab_size"], (2, 11))
        with torch.no_grad():
            logits = model(input_ids).logits
            exact = model.float()(input_ids).logits
        tensors = {"input_ids": input_ids, "logits": logits, "logits_in_float32": exact}
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "expected")


if __name__ == "__main__":
    main()
