"""What is reused: questions in a session, memory on disk, many questions in one run.

    python benchmarks/engine.py [--model apollo-nano] [--minutes 60]

Every figure is a ratio of two runs of the same process on the same file, which it makes itself.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.media import make_video

QUESTION = "What colour is the ball?"


def session(model: str, video: Path) -> None:
    """First and second question, from the file and from memory."""
    from apollo_cli import engine
    from apollo_cli.config import GenerationOptions

    options = GenerationOptions(max_new_tokens=8)
    apollo = engine.load(model)
    begin = time.perf_counter()
    memory = apollo.watch(video)
    watched = time.perf_counter()
    apollo.ask(memory, QUESTION, options)
    first = time.perf_counter()
    apollo.ask(memory, "Which way does it move?", options)
    second = time.perf_counter()
    again = apollo.watch(video)
    remembered = time.perf_counter()
    apollo.ask(again, QUESTION, options)
    asked = time.perf_counter()
    print(f"watching the file               {watched - begin:8.2f} s   {memory.plan.describe()}")
    print(f"first question                  {first - watched:8.2f} s")
    print(f"second question                 {second - first:8.2f} s")
    print(f"  second / first with watching  {(second - first) / (first - begin):8.3f}")
    print(f"watching again, from memory     {remembered - second:8.2f} s")
    ratio = (first - begin) / (asked - second)
    print(f"  file / memory, each with one question  {ratio:8.1f}   wanted 20 or more on an hour")


def ten_questions(model: str, video: Path) -> None:
    """Ten questions in one run of the command against ten runs."""
    command = [sys.executable, "-m", "apollo_cli", "ask", str(video), "--model", model, "--quiet"]
    command += ["--max-new-tokens", "8", "--no-cache"]
    questions = [f"{QUESTION} ({number})" for number in range(10)]
    begin = time.perf_counter()
    subprocess.run(
        command + [word for q in questions for word in ("-q", q)], check=True, capture_output=True
    )
    together = time.perf_counter() - begin
    begin = time.perf_counter()
    for question in questions:
        subprocess.run([*command, question], check=True, capture_output=True)
    apart = time.perf_counter() - begin
    print(f"ten questions in one run        {together:8.2f} s")
    print(f"ten runs                        {apart:8.2f} s")
    print(f"  ratio                         {apart / together:8.1f}   wanted 5 or more")


def first_token() -> None:
    """Time to the first token against transformers' own generate on the same weights."""
    import torch
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

    from apollo_cli.model.generate import prefill

    shape: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2}
    heads: dict[str, Any] = {
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
    }
    llm: Any = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, tie_word_embeddings=True)).eval()

    class Model:
        """As much of a model as prefill needs."""

        def __init__(self) -> None:
            self.llm = llm

    embeddings = torch.randn(1, 1024, 1536) * 0.02
    ours, theirs = [], []
    for _ in range(4):
        begin = time.perf_counter()
        prefill(Model(), embeddings, DynamicCache(config=llm.config)).argmax()  # pyright: ignore[reportArgumentType]
        ours.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        with torch.inference_mode():
            llm.generate(inputs_embeds=embeddings, max_new_tokens=1, do_sample=False)
        theirs.append(time.perf_counter() - begin)
    print(f"first token, ours               {min(ours):8.3f} s")
    print(f"first token, transformers       {min(theirs):8.3f} s")
    print(f"  ratio                         {min(ours) / min(theirs):8.3f}   wanted 1.05 or less")


def main() -> None:
    """Make the file, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="apollo-nano")
    parser.add_argument("--minutes", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["APOLLO_HOME"] = folder
        video = make_video(Path(folder) / "video.mp4", options.minutes * 60)
        session(options.model, video)
        ten_questions(options.model, make_video(Path(folder) / "short.mp4", 60))
    first_token()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process     {peak:8.0f} MiB")


if __name__ == "__main__":
    main()
