"""Opens the model that is trained, for the policy's ranks and for supervised fine-tuning."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.architectures import require_parallel
from penstock_learner.model.causal_lm import CausalLM, open_model
from penstock_learner.model.published_layout import fit_to_folder
from penstock_learner.model.routers import watch_routers
from penstock_learner.model.torch_settings import DTYPES


def open_policy(config: RunConfig) -> CausalLM:
    """The model of `model.path`, with an adapter and with watched routers if the config asks for them.

    It is on the meta device until `TrainerRank.prepare` reads its weights."""
    learner = config.learner
    model = open_model(
        config.model.path, DTYPES[learner.master_dtype], learner.logprob_chunk_tokens, compiled=learner.compile
    )
    require_parallel(model.lm.config, model.path, learner.sequence_parallel)
    fit_to_folder(model.lm, config.model.path, "model.path")
    if learner.lora is not None:
        add_adapter(model, learner.lora)
    model.watch = watch_routers(model.lm, learner)
    return model
