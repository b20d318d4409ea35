#!/usr/bin/env python3
"""Train a model: `python scripts/train.py --mesh tp=4,pp=2`. The path is here -> jaxmeg.train.run -> step.make_train_step."""

import os
import sys
import traceback

from jaxmeg.cli import ConfigError, check, fail, given_keys, parse, start, take_auto
from jaxmeg.config import Config, mesh_sizes
from jaxmeg.processes.roll_call import StartError
from jaxmeg.processes.variables import MEMORY_FRACTION, collective_of, explain


def main(argv: list[str]) -> int:
    argv, auto = take_auto(argv)
    config = parse(argv)
    devices = start(config, whole=not auto)

    import jax  # from here on the number of devices is fixed

    from jaxmeg.processes.connect import connect
    from jaxmeg.processes.leave import leave

    try:
        connect(config.distributed, devices, config.guard.silent_seconds)
    except StartError as error:
        fail([str(error)])
    try:
        if len(jax.devices()) < devices.count:
            fail([f"jax sees {len(jax.devices())} {jax.default_backend()} devices, and the run has {devices.count}: check the driver and "
                  "jax's plugin with scripts/doctor.py, or run on the CPU with --emulate"])
        return leave(train(laid_out(config, argv) if auto else config))
    except SystemExit as end:
        return leave(int(end.code or 0))
    except Exception:
        traceback.print_exc()
        return leave(1)


def laid_out(config: Config, argv: list[str]) -> Config:
    """The config with a layout chosen for the devices; what argv names stays as it is."""
    import jax

    from jaxmeg.planner.auto import AutoError, choose

    if config.model.module is not None:
        fail(["--mesh auto does not work with model.module: use --mesh dp=N and --zero"])
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0) / MEMORY_FRACTION
    try:
        config, why = choose(config, given_keys(argv), device.device_kind, memory, jax.device_count())
    except AutoError as error:
        fail([str(error)])
    check(config, jax.device_count())
    if jax.process_index() == 0:
        print("mesh auto:", *why, sep="\n  ", file=sys.stderr)
    return config


def train(config: Config) -> int:
    """The exit code: 2 for what was refused at the start, 1 for what failed later. Process 0 alone says what all know."""
    import jax

    from jaxmeg.checkpoint.manifest import CheckpointError
    from jaxmeg.checkpoint.save import SaveError
    from jaxmeg.data.store import DataError
    from jaxmeg.models.own import OwnModuleError
    from jaxmeg.processes.agree import ProcessError
    from jaxmeg.record.log import LogError
    from jaxmeg.train import RunError, Stopped, run

    try:
        run(config)
    except (SaveError, LogError, ProcessError) as error:  # of this process alone, it may be
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ConfigError, CheckpointError, DataError, OwnModuleError) as error:
        fail(str(error).splitlines())
    except RunError as error:
        stopped = isinstance(error, Stopped)
        if jax.process_index() == 0:
            print(error if stopped else f"error: {error}", file=sys.stderr)
        return error.code if stopped else 1
    except KeyboardInterrupt:
        print("interrupted at once: the checkpoints so far are all there is", file=sys.stderr)
        return 130
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        found = explain(str(error))
        if found is None or os.environ.get("JAXMEG_VERBOSE"):
            raise
        sizes = {str(axis): size for axis, size in mesh_sizes(config.mesh, jax.device_count()).items()}
        where = collective_of(str(error), [device.id for device in jax.devices()], sizes)
        said = str(error).splitlines()[0][:200]
        print(f"error: {found.line}{f'; it was {where}' if where else ''} (jax: {said}; JAXMEG_VERBOSE=1 shows all)", file=sys.stderr)
        if found.is_memory:
            from jaxmeg.planner.advice import after_failure
            memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) / MEMORY_FRACTION
            print(*after_failure(config, jax.devices()[0].device_kind, memory, jax.device_count()), sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
