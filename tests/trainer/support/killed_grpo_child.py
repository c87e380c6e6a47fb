"""A GRPO run that continues where it was killed; writes its rollouts and, at the end, weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import trl_child


def main(folder: Path, steps: int) -> None:
    trainer = trl_child.build(
        trl_child.LiveGRPOTrainer, "grpo", folder, max_steps=steps, optim="adamw_torch", beta=0.1,
        save_strategy="steps", save_steps=1, save_total_limit=2, max_grad_norm=1.0,
    )  # fmt: skip
    complete = trainer._complete

    def recorded(*args, **kwargs):
        completions = complete(*args, **kwargs)
        line = [trainer.state.global_step, [list(c.token_ids) for c in completions]]
        with (folder / "rollouts.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return completions

    trainer._complete = recorded
    saved = [*(folder / "run").glob("checkpoint-*/nopad_manifest.json")]
    trainer.train(resume_from_checkpoint=bool(saved))
    torch.save(trainer.model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
