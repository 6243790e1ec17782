"""transformers: makes a tiny language model on the spot, saves it, and fine-tunes it with the Trainer.

torchrun --nproc-per-node 2 examples/transformers_finetune.py
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

from gradlane.integrations.transformers import attach_trainer

TEXT = __doc__ * 40  # what it learns, byte by byte
CONTEXT = 32


def make_model(folder: Path) -> None:
    """In place of a download: the Trainer below does not know the difference."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def finetune(model: Path, strategy: str, steps: int, out: Path) -> None:
    rows = torch.frombuffer(bytearray(TEXT.encode("ascii")), dtype=torch.uint8).long().unfold(0, CONTEXT, 5)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=TrainingArguments(
            output_dir=str(out),
            use_cpu=True,
            max_steps=steps,
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            learning_rate=3e-3,
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    comm = attach_trainer(trainer, strategy)  # the only line that is not of transformers
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        ratio = comm.attachment.metrics()["comm/ratio"]
        print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}, {ratio:.1f} times fewer bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategy", default="ErrorFeedback(Sharded(Int8()))")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"model-{os.environ.get('RANK', 0)}"
        make_model(made)
        finetune(made, options.strategy, options.steps, Path(folder) / "run")


if __name__ == "__main__":
    main()
