#!/usr/bin/env python3
"""Train a model: `python scripts/train.py --mesh tp=4,pp=2`. The path is here -> jaxmeg.train.run -> step.make_train_step."""

import sys

from jaxmeg.cli import ConfigError, fail, parse, start


def main(argv: list[str]) -> int:
    config = parse(argv)
    count = start(config)

    import jax  # from here on the number of devices is fixed

    from jaxmeg.checkpoint.manifest import CheckpointError
    from jaxmeg.data.store import DataError
    from jaxmeg.models.own import OwnModuleError
    from jaxmeg.processes.connect import connect
    from jaxmeg.train import RunError, Stopped, run

    connect(config.distributed)
    if len(jax.devices()) < count:
        fail([f"jax sees {len(jax.devices())} {jax.default_backend()} devices, but this machine has {count}: check the driver and jax's "
              "plugin with tpu_gpu_setup/check_devices.py, or run on the CPU with --emulate"])
    try:
        run(config)
    except (ConfigError, CheckpointError, DataError, OwnModuleError) as error:
        fail(str(error).splitlines())
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted at once: the checkpoints so far are all there is", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
