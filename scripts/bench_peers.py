"""Our trainer, the shortest hand-written loop and TorchTitan in turns, on the same devices: one model, one batch, one table.

    WORLD=2 python scripts/bench_peers.py recipe=llama_hsdp parallel=fsdp train.global_batch=4

Arguments are those of elastictrain.run for a Llama without tied embeddings. Each contender is a torchrun of its own, with
WORLD ranks (1), ROUNDS (2) times in each of PRECISIONS ("bf16 fp8"); STEPS (20) steps count, and the median of rounds is shown.
TorchTitan 0.2.2 trains on documents of the standard library, by their bytes; it needs a GPU. OURS and TITAN are arguments for
one of the two alone, for settings at which each is fastest. CONTENDERS are "ours by-hand torchtitan".
"""

import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

WORLD, ROUNDS, STEPS = (int(os.environ.get(name, "0")) or usual for name, usual in (("WORLD", 1), ("ROUNDS", 2), ("STEPS", 20)))
PRECISIONS = os.environ.get("PRECISIONS", "bf16 fp8").split()
CONTENDERS = os.environ.get("CONTENDERS", "ours by-hand torchtitan").split()
LIMIT_S = float(os.environ.get("LIMIT_S", "240"))
DOCUMENTS = 400
BASE = ("data=stdlib", "data.holdout_samples=0")
_OURS = re.compile(r"^(?:ours|hand-written) .*?([\d.]+) ms/step +(\d+) tokens/s/device", re.MULTILINE)
_TITAN = re.compile(r"step: +(\d+) .*?memory: +([\d.]+)GiB.*?tps: +([\d,]+).*?mfu: +([\d.]+)%")


def torchrun(arguments: Sequence[str], **variables: str) -> str:
    """What rank 0 and its launcher print; the end of that is shown if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {LIMIT_S:g} s"
    if done.returncode:
        print(done.stdout[-3000:], flush=True)
    return done.stdout


def our_speed(arguments: Sequence[str], precision: str, *, alone: str) -> dict[str, float]:
    """Of our trainer, or of the hand-written loop (`alone`: "theirs")."""
    block = max(1, STEPS // 2)
    said = torchrun(
        [str(ROOT / "scripts" / "bench_step.py"), *BASE, *arguments, f"train.precision={precision}"],
        BENCH_ALONE=alone,
        BENCH_STEPS=str(block),
        BENCH_BLOCKS="2",
    )
    memory = re.search(r"^peak memory ([\d.]+) GB", said, re.MULTILINE)
    found = _OURS.search(said)
    return {"tokens/s": float(found[2]), "GB": float(memory[1]) if memory else 0.0} if found else {}


def titan_speed(plan: Mapping[str, Any], precision: str, folder: Path) -> dict[str, float]:
    """Of TorchTitan: the steps of the second half."""
    said = torchrun(
        [__file__, "titan", json.dumps({**plan, "precision": precision, "folder": str(folder)})], HF_HUB_OFFLINE="1"
    )
    rows = [one for one in _TITAN.findall(re.sub(r"\x1b\[\d+m", "", said)) if int(one[0]) > STEPS]
    if not rows:
        return {}
    median = [statistics.median(float(one[place].replace(",", "")) for one in rows) for place in (1, 2, 3)]
    return {"tokens/s": median[1], "GB": median[0] * 2**30 / 1e9, "MFU %": median[2]}


def why_no_titan() -> str:
    """Why TorchTitan is left out; empty if it is not."""
    import torch

    if not torch.cuda.is_available():
        return "it needs a GPU"
    missing = [name for name in ("torchtitan", "torchdata", "datasets", "tyro") if find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""


def plan_of(arguments: Sequence[str]) -> dict[str, Any]:
    """What TorchTitan must know of the same run."""
    from elastictrain.config.load import load
    from elastictrain.config.task_signature import build_task

    config = load([*BASE, "train.eval_every_steps=0", *arguments])
    model, train = build_task(config)._config, config.train
    return {
        "model": {
            name: getattr(model, name) for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
        },
        "seq_len": train.seq_len,
        "micro_batch": train.micro_batch,
        "global_batch": train.global_batch,
        "compile": train.compile,
        "checkpointing": train.activation_checkpointing,
        "steps": 2 * STEPS,
        "more": os.environ.get("TITAN", "").split(),
    }


def prepare_titan(folder: Path) -> None:
    """Documents and a tokenizer of bytes, in the forms that TorchTitan reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "documents").mkdir()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:DOCUMENTS]
    lines = (json.dumps({"text": file.read_text(errors="replace")}) + "\n" for file in files)
    (folder / "documents" / "data.json").write_text("".join(lines))


def titan_arguments(plan: Mapping[str, Any]) -> list[str]:
    switches = ["--compile.enable"] * bool(plan["compile"])
    if plan["precision"] == "fp8":
        switches += ["--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "output"]
        switches += [
            f"--quantize.linear.float8.{name}"
            for name in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
        ]
    values = {
        "job.dump_folder": f"{plan['folder']}/dump",
        "metrics.log_freq": max(1, STEPS // 4),
        "model.name": "llama3",
        "model.flavor": "peer",
        "model.hf_assets_path": plan["folder"],
        "training.dataset": "c4_test",
        "training.dataset_path": f"{plan['folder']}/documents",
        "training.local_batch_size": plan["micro_batch"],
        "training.global_batch_size": plan["global_batch"],
        "training.seq_len": plan["seq_len"],
        "training.steps": plan["steps"],
        "activation_checkpoint.mode": plan["checkpointing"],
        "activation_checkpoint.selective_ac_option": "op",
    }
    return [*(text for name, value in values.items() for text in (f"--{name}", str(value))), *switches, *plan["more"]]


def run_titan(plan: Mapping[str, Any]) -> None:
    """TorchTitan's trainer in this process, a rank of a torchrun."""
    # It takes its arguments when it is imported.
    sys.argv[1:] = titan_arguments(plan)
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.train import Trainer, main

    model = plan["model"]
    unscaled = int(2 * 4 * model["dim"] / 3)
    llama3_args["peer"] = TransformerModelArgs(
        dim=model["dim"],
        n_layers=model["num_layers"],
        n_heads=model["num_heads"],
        n_kv_heads=model["num_kv_heads"],
        vocab_size=model["vocab_size"],
        # It computes the width of the feed-forward part from these two, and rounds up to a multiple.
        ffn_dim_multiplier=model["ffn_dim"] / unscaled,
        multiple_of=gcd(model["ffn_dim"], 1024),
        rope_theta=500000,
    )
    main(Trainer)


def compare(arguments: Sequence[str]) -> None:
    without = why_no_titan() if "torchtitan" in CONTENDERS else "it is not asked for"
    ours = [*arguments, *os.environ.get("OURS", "").split()]
    speeds: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = {} if without else plan_of(arguments)
        if not without:
            prepare_titan(folder)
        for _ in range(ROUNDS):
            for precision in PRECISIONS:
                if "ours" in CONTENDERS:
                    speeds["ours", precision].append(our_speed(ours, precision, alone="ours"))
                if "by-hand" in CONTENDERS:
                    speeds["by hand", precision].append(our_speed(arguments, precision, alone="theirs"))
                if not without:
                    speeds["TorchTitan", precision].append(titan_speed(plan, precision, folder))
    show(arguments, speeds)
    if without:
        print(f"TorchTitan is left out: {without}")


def show(arguments: Sequence[str], speeds: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> None:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{WORLD} x {device}, torch {torch.__version__}: {' '.join(arguments)}\n")
    print("| | precision | tokens/s/device, median of rounds | each round | peak memory |\n|---|---|---|---|---|")
    for (who, precision), rounds in speeds.items():
        found = [one["tokens/s"] for one in rounds if one]
        if not found:
            print(f"| {who} | {precision} | failed | | |")
            continue
        memory = max(one["GB"] for one in rounds if one)
        each = ", ".join(f"{one:,.0f}" for one in found)
        print(f"| {who} | {precision} | {statistics.median(found):,.0f} | {each} | {memory:.1f} GB |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["titan"]:
        run_titan(json.loads(sys.argv[2]))
    else:
        compare(sys.argv[1:])
