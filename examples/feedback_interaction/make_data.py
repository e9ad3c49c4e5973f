"""Write `train.parquet` and `heldout.parquet`: the arithmetic problems, for `interaction_agent`.

    python make_data.py

`extra_info.interaction_kwargs` names the interaction. Its other values are passed to the interaction.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "arithmetic"))

from make_data import Problem, answer, question, split_problems  # noqa: E402  (the arithmetic example's)

NUM_TRAIN, NUM_HELDOUT = 1024, 128


def write(problems: list[Problem], split: str) -> None:
    rows = [
        {
            "data_source": "penstock/feedback",
            "prompt": [{"role": "user", "content": question(problem)}],
            "agent_name": "interaction_agent",
            "reward_model": {"style": "rule", "ground_truth": answer(problem)},
            "extra_info": {
                "split": split,
                "index": index,
                "interaction_kwargs": {"name": "feedback", "ground_truth": answer(problem)},
            },
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), FOLDER / f"{split}.parquet", compression="zstd")


if __name__ == "__main__":
    train, heldout = split_problems()
    write(train[:NUM_TRAIN], "train")
    write(heldout[:NUM_HELDOUT], "heldout")
