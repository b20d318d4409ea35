"""Do the Python packages fit together? Versions against what the packages themselves require, from their metadata alone.

Nothing is imported here, so it also tells of a jax that cannot be. `facts` reads this Python, `packages` judges.
Reference: https://packaging.python.org/en/latest/specifications/core-metadata/
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from jaxmeg.doctor.finding import Finding, Problem, conclude

NAME = "packages"
SHOWN = ("jaxmeg", "jax", "jaxlib", "flax")
JUDGED = ("jaxmeg", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "jax-cuda12-plugin", "jax-cuda13-plugin")
# Extras whose packages need not be there, but have to fit if they are.
OPTIONAL = ("cuda12", "cuda13", "cuda12-local", "cuda13-local", "with-cuda", "tpu")
REPAIR = 'pip install -e ".[cuda13]" on NVIDIA GPUs, or pip install -e . elsewhere'


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is installed."""

    python: str
    requires_python: str | None
    """What jaxmeg's metadata ask for, such as >=3.11; None where jaxmeg is not installed."""
    installed: dict[str, tuple[str, ...]]
    """Name, normalised -> versions on the path; more than one is a fault."""
    requirements: dict[str, tuple[str, ...]]
    """Name -> what the package requires, as in its metadata; of those in JUDGED that are installed."""
    jax_imported_from: str | None
    """The file that `import jax` would run."""
    jax_installed_at: str | None
    """The one that belongs to the installed package."""


def normal(name: str) -> str:
    """A package name in its normal form: jax_cuda13_plugin -> jax-cuda13-plugin."""
    return re.sub(r"[-_.]+", "-", name).lower()


def facts() -> Facts:
    """Read this Python."""
    versions: dict[str, list[str]] = {}
    requirements: dict[str, tuple[str, ...]] = {}
    requires_python, jax_at = None, None
    for dist in metadata.distributions():
        raw = dist.metadata["Name"]
        if not raw:  # a folder that pip left behind half removed
            continue
        name = normal(raw)
        versions.setdefault(name, []).append(dist.version)
        if name in JUDGED:
            requirements.setdefault(name, tuple(dist.requires or ()))
        if name == "jaxmeg":
            requires_python = dist.metadata["Requires-Python"]
        if name == "jax" and jax_at is None:
            jax_at = str(dist.locate_file("jax/__init__.py"))
    spec = find_spec("jax")
    return Facts(python=platform.python_version(), requires_python=requires_python,
                 installed={name: tuple(dict.fromkeys(found)) for name, found in versions.items()}, requirements=requirements,
                 jax_imported_from=spec.origin if spec else None, jax_installed_at=jax_at)


def packages(facts: Facts) -> Finding:
    """Python, missing packages, versions that exclude each other, packages that are there twice, which jax is imported."""
    versions = {name: found[0] for name, found in facts.installed.items()}
    shown = [f"{name} {versions[name]}" for name in SHOWN if name in versions]
    accelerator = [f"{name} {version}" for name, version in sorted(versions.items())
                   if name.startswith(("jax-cuda", "nvidia-", "libtpu"))]
    plugins = [line for line in accelerator if line.endswith("-plugin") or "-plugin " in line]
    fine = ", ".join([f"python {facts.python}", *shown, *plugins])
    others = [f"{name} {versions[name]}" for name in JUDGED if name in versions and name not in SHOWN]
    return conclude(NAME, fine, _problems(facts, versions), [*others, *accelerator, f"jax from {facts.jax_imported_from}"])


def _problems(facts: Facts, versions: dict[str, str]) -> Iterator[Problem]:
    if facts.requires_python is None:
        yield Problem("warn", "jaxmeg is not installed in this Python, so what it needs is not known", "run pip install -e . in its folder")
    elif not Requirement(f"python{facts.requires_python}").specifier.contains(facts.python, prereleases=True):
        yield Problem("FAIL", f"python {facts.python} is not {facts.requires_python}", "use a newer Python")
    for name, found in facts.installed.items():
        if len(found) > 1 and name in JUDGED:
            yield Problem("FAIL", f"{name} is installed {len(found)} times: {' and '.join(found)}",
                          f"pip uninstall {name} until it is gone, then install it once")
    yield from _requirements(facts, versions)
    both = [name for name in ("jax-cuda12-plugin", "jax-cuda13-plugin") if name in versions]
    if len(both) == 2:
        yield Problem("FAIL", "plugins for CUDA 12 and CUDA 13 are both installed", f"pip uninstall {both[0]} jax-cuda12-pjrt")
    wanted, found = facts.jax_installed_at, facts.jax_imported_from
    if wanted and found and Path(wanted).resolve() != Path(found).resolve():
        yield Problem("warn", f"import jax runs {found}, which is not the installed jax", "look at PYTHONPATH and the current folder")


def _requirements(facts: Facts, versions: dict[str, str]) -> Iterator[Problem]:
    """Each unfit package once, with everyone who minds."""
    minds: dict[tuple[str, str | None], list[str]] = {}
    for owner, texts in facts.requirements.items():
        for required in map(Requirement, texts):
            name = normal(required.name)
            always = required.marker is None or required.marker.evaluate({"extra": ""})
            optional = not always and any(required.marker and required.marker.evaluate({"extra": extra}) for extra in OPTIONAL)
            there = versions.get(name)
            fits = there is not None and required.specifier.contains(there, prereleases=True)
            if (always and not fits) or (optional and there is not None and not fits):
                minds.setdefault((name, there), []).append(f"{owner} {versions[owner]} needs {name}{required.specifier}")
    for (name, there), needs in minds.items():
        what = f"{name} is missing" if there is None else f"{name} is {there}"
        yield Problem("FAIL", f"{what}, and {', '.join(dict.fromkeys(needs))}", REPAIR)


def cuda_major(facts: Facts) -> int | None:
    """12 or 13: what the installed plugin is built for."""
    found = [major for major in (13, 12) if f"jax-cuda{major}-plugin" in facts.installed]
    return found[0] if found else None
