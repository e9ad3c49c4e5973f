"""Make the example's starting checkpoint: a tiny Qwen2 that has seen a calculator in use, and uses it badly.

    python make_model.py --out model

The model is trained from random weights, supervised, on two kinds of transcript (`|` stands for the end token):

    47+85=[47+85]|132=132|     a call of the calculator, and its result as the answer
    47+85=917|                 a guess, mostly wrong

`P_CALL` of the transcripts call the calculator. `P_SLIP` of the calls and `P_SLIP` of the copied results have a wrong
digit. The tool's tokens are not trained. Reinforcement learning has to find out, from a reward of 0 or 1 for the last
turn, that it pays to call the calculator and to copy its result exactly.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "arithmetic"))

from make_data import Problem, answer, question, split_problems  # noqa: E402  (the arithmetic example's)
from make_model import EOS, make_tokenizer  # noqa: E402

P_CALL = 0.4
P_SLIP = 0.15
P_LUCK = 0.05
NUM_STEPS, LR, BATCH_SIZE = 1500, 2e-3, 128

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% elif message['role'] == 'tool' %}={% endif %}"
    "{% endfor %}"
)
"""The assistant's turn ends with the end token, the tool's turn with `=`. The template does not show tool schemas."""

Part = tuple[str, bool]
"""A text, and whether the model writes it."""


def slip(text: str, rng: random.Random) -> str:
    """The number, perhaps with one wrong digit."""
    if rng.random() >= P_SLIP:
        return text
    place = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
    return text[:place] + rng.choice("0123456789") + text[place + 1 :]


def transcript(problem: Problem, rng: random.Random) -> list[Part]:
    if rng.random() < P_CALL:
        call = slip(question(problem)[:-1], rng)
        first, second = call.split("+")
        result = str(int(first) + int(second))
        return [
            (question(problem), False),
            (f"[{call}]{EOS}", True),
            (f"{result}=", False),
            (slip(result, rng) + EOS, True),
        ]
    guess = answer(problem) if rng.random() < P_LUCK else str(rng.randrange(20, 199))
    return [(question(problem), False), (guess + EOS, True)]


def make_model(tokenizer) -> Qwen2ForCausalLM:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # head size 32, the smallest that vLLM's CPU attention takes
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ids)
    return model


def encode(parts: list[Part], tokenizer) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    for text, is_said in parts:
        tokens = tokenizer(text)["input_ids"]
        ids += tokens
        labels += tokens if is_said else [-100] * len(tokens)
    return ids, labels


def batch(problems: list[Problem], tokenizer, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [encode(transcript(problem, rng), tokenizer) for problem in rng.choices(problems, k=BATCH_SIZE)]
    longest = max(len(ids) for ids, _ in rows)
    padded = [(ids + [0] * (longest - len(ids)), labels + [-100] * (longest - len(ids))) for ids, labels in rows]
    return torch.tensor([ids for ids, _ in padded]), torch.tensor([labels for _, labels in padded])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER / "model", help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=NUM_STEPS, pct_start=0.05)
    problems, _ = split_problems()
    for step in range(NUM_STEPS):
        ids, labels = batch(problems, tokenizer, rng)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == NUM_STEPS - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
