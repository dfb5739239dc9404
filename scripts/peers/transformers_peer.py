"""transformers' DeepseekV4ForCausalLM as a process that takes commands, one JSON line each.

A process of its own, because torch's threads spin after each operation and would slow whoever is
measured next in the same process.
"""

import json
import sys
import time
from typing import Any

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    sys.exit(2)


class Peer:
    """One model and one cache."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        config = transformers.DeepseekV4Config.from_pretrained(folder)
        self.model = transformers.DeepseekV4ForCausalLM(config).float().eval()
        self.model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=True)
        self.cache: Any = None

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Consumes a prompt into an empty cache, in one call."""
        began = time.perf_counter()
        out = self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - began
        self.cache = out.past_key_values
        return {"seconds": seconds, "logits": out.logits[0, -1].tolist()}

    def decode(self, ids: list[int]) -> dict[str, Any]:
        """Consumes tokens one by one."""
        seconds = []
        for token in ids:
            began = time.perf_counter()
            out = self.model(torch.tensor([[token]]), past_key_values=self.cache, use_cache=True)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "logits": out.logits[0, -1].tolist()}

    def cache_bytes(self) -> dict[str, Any]:
        """Bytes of every tensor the cache holds."""
        seen: dict[int, int] = {}

        def visit(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                seen[value.data_ptr()] = value.numel() * value.element_size()
            elif isinstance(value, dict):
                for item in value.values():
                    visit(item)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    visit(item)

        for layer in self.cache.layers:
            visit(vars(layer))
        return {"bytes": sum(seen.values())}


def main() -> None:
    """Answers each line with a line; nothing else goes to standard output."""
    start = json.loads(sys.stdin.readline())
    peer = Peer(start["folder"], start["threads"])
    print(json.dumps({"version": transformers.__version__, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(peer, command.pop("call"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
