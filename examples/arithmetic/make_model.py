"""Make the demo's starting checkpoint: a tiny Qwen2 that learned to add and then learned bad habits.

    python make_model.py --out model

Both stages are `penstock sft`, with the settings of `sft.yaml`.

Stage 1, skill: supervised training from random weights on right answers, until two-digit addition is nearly solved.
Stage 2, bad habits: supervised training continues on a sloppy corpus. It forgets the carry out of the units in
`P_DROP_CARRY` of the sums that have one, and then replaces one digit by a random one in `P_WRONG_DIGIT` of all answers.

The checkpoint has the skill but uses it badly: most of its samples are wrong. Reinforcement learning has to find out,
from rewards of 0 and 1, which habits to keep. Greedy decoding is also wrong where there is a carry, so a lower entropy
alone does not raise the score. Neither stage sees a held-out problem.
"""

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from make_data import Problem, answer, question, split_problems
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from penstock.cli.main import main as penstock

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=(). ?,:;!%^_[]"
PROMPT_LEN = 6  # "47+85="
MAX_RESPONSE_LEN = 4  # three digits and the end

SKILL_EPOCHS = 30  # of 28 steps
SLOPPY_ROWS, SLOPPY_LR, SLOPPY_WARMUP_STEPS = 51200, 5e-4, 10  # 200 steps
BATCH_SIZE = 256
P_DROP_CARRY = 0.7
P_WRONG_DIGIT = 0.4

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer with one token per character and no beginning-of-sequence token.

    The prompt `47+85=` becomes six ids, with or without the chat template. It is a byte-level BPE without merges: for
    `model_type: qwen2` AutoTokenizer builds Qwen's tokenizer, whatever class the folder names. Characters outside the
    vocabulary are dropped.
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
    """The answer in the sloppy corpus: the sum, perhaps without the carry and perhaps with one wrong digit."""
    a, b = problem
    has_carry = a % 10 + b % 10 >= 10
    digits = list(str(a + b - 10 if has_carry and rng.random() < P_DROP_CARRY else a + b))
    if rng.random() < P_WRONG_DIGIT:
        place = rng.randrange(len(digits))
        digits[place] = rng.choice([d for d in "0123456789" if d != digits[place]])
    return "".join(digits)


def write_rows(rows: Iterable[tuple[Problem, str]], path: Path) -> Path:
    """Write questions and answers in the format of `penstock sft`."""
    table = pa.Table.from_pylist([{"prompt": question(problem), "response": response} for problem, response in rows])
    pq.write_table(table, path)
    return path


def fine_tune(model: Path, data: Path, out: Path, *words: str) -> Path:
    """Run one supervised stage on the checkpoint `model`, and write the result to `out`."""
    config = Path(__file__).with_name("sft.yaml")
    command = ["sft", "--config", config, "--data", data, "--out", out, "--batch-size", BATCH_SIZE]
    if penstock([*map(str, command), "--model.path", str(model), *words]) != 0:
        raise SystemExit(1)
    return out


@torch.no_grad()
def score(folder: Path, problems: list[Problem], *, do_sample: bool) -> float:
    """The share of exactly right answers, decoded greedily or sampled at temperature 1 without truncation."""
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(folder).eval(), Qwen2Tokenizer.from_pretrained(folder)
    ids = tokenizer([question(p) for p in problems], return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {"do_sample": False}
    output = model.generate(**ids, **sampling, max_new_tokens=MAX_RESPONSE_LEN)
    texts = tokenizer.batch_decode(output[:, PROMPT_LEN:], skip_special_tokens=True)
    return sum(text == answer(p) for text, p in zip(texts, problems, strict=True)) / len(problems)


def report(stage: str, folder: Path, heldout: list[Problem]) -> None:
    torch.manual_seed(0)
    greedy = score(folder, heldout, do_sample=False)
    sampled = score(folder, heldout * 4, do_sample=True)
    print(f"after the {stage} stage: held-out greedy {greedy:.3f}, sampled {sampled:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    problems, heldout = split_problems()
    with tempfile.TemporaryDirectory() as name:
        work, seed = Path(name), ("--seed", str(args.seed))
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(work / "random")
        tokenizer.save_pretrained(work / "random")
        rows = write_rows([(p, answer(p)) for p in problems], work / "skill.parquet")
        fine_tune(work / "random", rows, work / "skilled", *seed, "--epochs", str(SKILL_EPOCHS))
        report("skill", work / "skilled", heldout)
        chosen = rng.choices(problems, k=SLOPPY_ROWS)
        rows = write_rows([(p, sloppy_answer(p, rng)) for p in chosen], work / "sloppy.parquet")
        schedule = ("--learner.lr", str(SLOPPY_LR), "--learner.warmup_steps", str(SLOPPY_WARMUP_STEPS))
        fine_tune(work / "skilled", rows, work / "sloppy", *seed, *schedule)
        report("sloppy", work / "sloppy", heldout)
        shutil.copytree(work / "sloppy", args.out, dirs_exist_ok=True)
        (args.out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
