"""Other frameworks at the same shapes, each a plain program of its own in `peers/` that runs in its own process and prints one JSON line.

The line has what only the program knows: {"seconds": [...], "losses": [...], "peak_bytes", "compile_s", "versions": {...}, "notes": [...]},
or {"error": "one line"}. Tokens/s, MFU and share of the roof are counted here, as for our own step. They run before jax takes the device.
A peer that can't run is a result too, with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from jaxmeg.arch import Arch, resolve_arch
from jaxmeg.bench.case import Case
from jaxmeg.bench.schema import empty_case
from jaxmeg.config import mesh_sizes
from jaxmeg.flops import mfu
from jaxmeg.validate.check import problems

FOLDER = Path(__file__).parent / "peers"
TIMEOUT = 900  # seconds
SAID = {"seconds", "losses", "peak_bytes", "compile_s", "versions", "notes"}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A program, and the packages without which it can't run."""

    file: str
    packages: tuple[str, ...]


PEERS: Mapping[str, Peer] = {
    "ceiling": Peer(file="plain_jax.py", packages=("jax", "optax")),
    "transformers": Peer(file="llama_torch.py", packages=("torch", "transformers")),
    "maxtext": Peer(file="maxtext.sh", packages=("maxtext",)),
}


class Heard(NamedTuple):
    """What a peer said at the shape of a case."""

    name: str
    case: Case
    arch: Arch
    said: Mapping[str, Any]


def run_peers(names: Sequence[str], cases: Sequence[Case], num_devices: int) -> list[Heard]:
    """Run every peer at every distinct shape of the cases."""
    shapes: dict[str, tuple[Case, Arch, dict[str, Any]]] = {}
    for case in cases if names else ():
        if problems(case.config, num_devices):
            continue  # ours can't run it either, and says why
        arch, data = resolve_arch(case.config.model), case.config.data
        shape = {"rows": data.global_batch, "seq_len": data.seq_len, **asdict(arch)}
        shapes.setdefault(json.dumps(shape), (case, arch, shape | {"steps": case.steps, "warmup": case.warmup}))
    found = []
    for case, arch, shape in shapes.values():
        for name in names:
            why = cannot(PEERS[name], arch, prod(mesh_sizes(case.config.mesh, num_devices).values()))
            found.append(Heard(name, case, arch, {"error": f"not run: {why}"} if why else _run(PEERS[name], shape)))
    return found


def cannot(peer: Peer, arch: Arch, num_devices: int) -> str | None:
    """Why a peer can't run a shape here, or None."""
    missing = [package for package in peer.packages if find_spec(package) is None]
    if missing:
        hint = ", see jaxmeg/bench/peers/maxtext.sh" if peer.file == "maxtext.sh" else ""
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed{hint}"
    if num_devices != 1:
        return f"the peers use one device, and this layout has {num_devices}"
    llama = (arch.norm, arch.positions, arch.activation) == ("rms", "rope", "swiglu")
    if not llama or arch.attn_bias or arch.out_bias or arch.mlp_bias or arch.qk_norm:
        return "the peers have Llama's shape alone"
    return None


def result(heard: Heard, peak_tflops: float | None) -> dict[str, Any]:
    """What a peer said, in the form of `schema.CASE`. peak_tflops: of the device; None gives no MFU."""
    name, case, arch, said = heard
    rows, seq_len = case.config.data.global_batch, case.config.data.seq_len
    known = empty_case(f"{name}, {rows} x {seq_len}", case.group, name, case.steps, case.warmup, model=asdict(arch), workload={
        "layers": arch.num_layers, "seq_len": seq_len, "rows": rows, "devices": 1, "mesh": "one device"})
    if "error" in said:
        return known | {"error": str(said["error"])}
    seconds, losses = said["seconds"], said["losses"]
    step = median(seconds)
    low, *_, high = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else (step, step)
    rate = rows * seq_len / step
    return known | {
        "step_s": known["step_s"] | {"median": step, "p5": low, "p95": high}, "tokens_per_s": rate, "tokens_per_s_per_device": rate,
        "mfu": mfu(arch, seq_len, rate, 1, peak_tflops) if peak_tflops else None, "compile_s": said["compile_s"],
        "memory": known["memory"] | {"allocator_peak_bytes": said["peak_bytes"]},
        "loss": {"first": losses[0], "last": losses[-1]}, "notes": said["notes"], "versions": said["versions"]}


def with_roofs(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results, with the share of the roof for peers whose shape one of our cases has."""
    roofs = {_shape(case): case["roof"]["seconds"] for case in results if case["roof"]["seconds"]}
    found = []
    for case in map(dict, results):
        step, roof = case["step_s"]["median"], roofs.get(_shape(case))
        if case["kind"] != "jaxmeg" and step and roof:
            case["roof"] = {"seconds": roof, "share": roof / step, "note": None}
        found.append(case)
    return found


def _shape(case: Mapping[str, Any]) -> str:
    return json.dumps([case["workload"], case.get("model")], sort_keys=True)


def _run(peer: Peer, shape: Mapping[str, Any]) -> dict[str, Any]:
    file = FOLDER / peer.file
    command = ["bash", str(file)] if file.suffix == ".sh" else [sys.executable, str(file)]
    try:
        ended = subprocess.run([*command, json.dumps(shape)], capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"error": f"not ended after {TIMEOUT} s"}
    return read_line(ended.stdout, ended.stderr, ended.returncode)


def read_line(out: str, err: str, code: int) -> dict[str, Any]:
    """What a peer printed, or its last line as an error."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "error" in said or ({*said} >= SAID and said["seconds"]):
                return said
    last = next((line for line in reversed([*out.splitlines(), *err.splitlines()]) if line.strip()), "it said nothing")
    return {"error": f"exit code {code}: {last.strip()[:300]}"}
