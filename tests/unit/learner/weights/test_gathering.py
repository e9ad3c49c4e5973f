"""A sharded model is gathered in the order of the manifest, whatever the sizes of buckets and weights are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from penstock.config.loading import validate
from penstock.weights.transports import Deadline
from penstock_learner.roles.policy import PolicyWorker
from support.learner_ranks import make_rank, one_rank_world, with_model
from support.tiny_architectures import tiny_model


@pytest.mark.parametrize("bucket_bytes", [1024, 10_000, 2**26], ids=["one weight each", "a few", "all in one"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_version_is_staged_whole_when_head_and_embedding_are_larger_than_a_bucket(
    name: str, bucket_bytes: int, tmp_path: Path
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" in stored, "the head is a weight of its own"
    settings = {"weights": {"bucket_bytes": bucket_bytes}, "learner": {"master_dtype": "bfloat16"}}
    config = validate(with_model(settings, tmp_path), "test")
    with one_rank_world():
        rank = make_rank(PolicyWorker, config)
        assert isinstance(rank.model, FSDPModule), "a model whose weights are cast is sharded even by one rank"
        assert rank.publisher is not None
        for version in (1, 2):
            rank.gather_weights(version, 1, [])
            staged = rank.publisher.staged[version]
            staged.wait_sealed(Deadline(30, "hashing"))
            assert staged.manifest.policy_version == version
            assert {spec.name for spec in staged.manifest.tensors} == stored.keys()
            for spec in staged.manifest.tensors:
                raw = staged.memory.buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
                assert torch.equal(raw.view(torch.float32), stored[spec.name].bfloat16().float().flatten()), spec.name
