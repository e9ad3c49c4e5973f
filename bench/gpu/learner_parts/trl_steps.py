"""TRL's GRPO loss on the benchmark's sequences: `compute_loss` of TRL's trainer, followed by a fused AdamW step."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from learner_parts.models import Shape
from learner_parts.steps import LR, make_model, padded
from penstock_learner.batches.sequence_batch import SequenceBatch


class Trl:
    """bfloat16, sdpa and activation checkpointing, like the plain contender. Loss, log-probs and entropy are TRL's."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.rows = shape.rows
        self.device = device
        self.model = make_model(shape, torch.bfloat16, device, "sdpa")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a")),
            pad_token="<pad>",
            eos_token="<eos>",
        )
        settings = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="penstock-bench-"),
            per_device_train_batch_size=max(2, shape.rows),
            num_generations=2,
            gradient_checkpointing=True,
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            report_to=[],
            beta=0.0,
        )
        self.trainer: Any = GRPOTrainer(
            model=self.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
            processing_class=tokenizer,
        )
        self.model.gradient_checkpointing_enable()
        self.model.train()
        # TRL's training loop would set these before the first loss.
        self.trainer.current_gradient_accumulation_steps = 1
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=device.type == "cuda")

    def state_bytes(self) -> int:
        return sum(p.numel() * p.element_size() * 4 for p in self.model.parameters())

    def step(self, batch: SequenceBatch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for first in range(0, batch.num_sequences, self.rows):
            part = batch.select(range(first, min(first + self.rows, batch.num_sequences)))
            ids, mask, old, advantages = (tensor.to(self.device) for tensor in padded(part))
            inputs = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": mask[:, :1],
                "completion_ids": ids[:, 1:],
                "completion_mask": mask[:, 1:],
                "advantages": advantages[:, 0],
                "old_per_token_logps": old,
                "num_items_in_batch": torch.tensor(len(batch.loss_mask), device=self.device),
            }
            self.trainer.compute_loss(self.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
