"""Make the demo's starting checkpoint: a tiny Qwen2 that can add, then has been taught bad habits.

    python make_model.py --out model

Stage 1, skill: supervised training from random weights on right answers, until two-digit addition is all but solved.
Stage 2, bad habits: supervised training goes on with a sloppy corpus. In it a carry out of the units is forgotten in
`P_DROP_CARRY` of the sums that have one; then one digit of the answer is replaced by a random one in `P_WRONG_DIGIT`
of all.

So the checkpoint does not lack the skill; it was trained to use it badly, and most of what it samples is wrong. What
reinforcement learning has to find, from a reward of 0 or 1 alone, is which of its habits to keep. Greedy decoding is
wrong as well wherever there is a carry, so the climb is more than a fall in entropy. Neither stage sees a held-out
problem.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from make_data import Problem, answer, question, split_problems
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=(). ?,:;!%^_[]"
PROMPT_LEN = 6  # "47+85="
MAX_RESPONSE_LEN = 4  # three digits and the end

SKILL_STEPS, SKILL_LR = 1000, 2e-3
SLOPPY_STEPS, SLOPPY_LR = 200, 5e-4
BATCH_SIZE = 256
P_DROP_CARRY = 0.7
P_WRONG_DIGIT = 0.4

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per character, no beginning-of-sequence token: the prompt `47+85=` is six ids by every route.

    A byte-level BPE without merges, because for `model_type: qwen2` AutoTokenizer builds Qwen's tokenizer whatever
    class the folder names. Characters outside the vocabulary are dropped.
    """
    characters = CHARACTERS.replace(" ", "\u0120")  # the byte-level alphabet's name for a space
    vocab = {token: index for index, token in enumerate([PAD, EOS, UNK, *characters])}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=128,
    )


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,  # head size 32, the smallest that vLLM's CPU attention takes
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ids)
    return model


def sloppy_answer(problem: Problem, rng: random.Random) -> str:
    """The sum as the sloppy corpus has it: perhaps without the carry, perhaps with one digit misprinted."""
    a, b = problem
    has_carry = a % 10 + b % 10 >= 10
    digits = list(str(a + b - 10 if has_carry and rng.random() < P_DROP_CARRY else a + b))
    if rng.random() < P_WRONG_DIGIT:
        place = rng.randrange(len(digits))
        digits[place] = rng.choice([d for d in "0123456789" if d != digits[place]])
    return "".join(digits)


def encode_batch(texts: list[str], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[batch, time]` and labels that leave out the prompt and the padding."""
    batch = tokenizer([text + EOS for text in texts], padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :PROMPT_LEN] = -100
    return batch["input_ids"], labels


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: list[Problem],
    target: Callable[[Problem], str],
    rng: random.Random,
    *,
    num_steps: int,
    peak_lr: float,
    name: str,
) -> None:
    """Cross-entropy on the answers; AdamW, linear warm-up over 5 % of the steps, cosine decay to nothing."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.98))
    model.train()
    started = time.monotonic()
    for step in range(num_steps):
        lr = peak_lr * min((step + 1) / (0.05 * num_steps), 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        chosen = rng.choices(problems, k=BATCH_SIZE)
        ids, labels = encode_batch([question(p) + target(p) for p in chosen], tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"{name} step {step:4d}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def score(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], *, do_sample: bool) -> float:
    """The share of exactly right answers, greedy or sampled at temperature 1 from the whole distribution."""
    model.eval()
    ids = tokenizer([question(p) for p in problems], return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {"do_sample": False}
    output = model.generate(**ids, **sampling, max_new_tokens=MAX_RESPONSE_LEN)
    texts = tokenizer.batch_decode(output[:, PROMPT_LEN:], skip_special_tokens=True)
    return sum(text == answer(p) for text, p in zip(texts, problems, strict=True)) / len(problems)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    problems, heldout = split_problems()

    def report(stage: str) -> None:
        greedy = score(model, tokenizer, heldout, do_sample=False)
        sampled = score(model, tokenizer, heldout * 4, do_sample=True)
        print(f"{stage}: held-out greedy {greedy:.3f}, sampled {sampled:.3f}", flush=True)

    train(model, tokenizer, problems, answer, rng, num_steps=SKILL_STEPS, peak_lr=SKILL_LR, name="skill")
    report("after the skill stage")

    def sloppy(problem: Problem) -> str:
        return sloppy_answer(problem, rng)

    train(model, tokenizer, problems, sloppy, rng, num_steps=SLOPPY_STEPS, peak_lr=SLOPPY_LR, name="sloppy")
    report("after the sloppy stage")
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
