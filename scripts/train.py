#!/usr/bin/env python3
"""Train a model: `python scripts/train.py --mesh tp=4,pp=2`. The path is here -> jaxmeg.train.run -> step.make_train_step."""

import os
import sys

from jaxmeg.cli import check, fail, parse
from jaxmeg.devices import plan_devices


def main(argv: list[str]) -> int:
    config = parse(argv)
    devices = plan_devices(config)
    check(config, devices.count)
    if devices.message:
        print(devices.message)
    if devices.emulated or devices.message:  # before jax is imported
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices.count}"

    from jaxmeg.data.text import DataError
    from jaxmeg.train import RunError, run

    try:
        run(config)
    except DataError as error:
        fail([str(error)])
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no weights were saved", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
