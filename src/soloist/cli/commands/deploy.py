"""`soloist deploy`: replicas over the machines of a cluster."""

from pathlib import Path
from typing import Annotated

import typer


def ray(
    config: Annotated[Path, typer.Argument(help="YAML file: models, replicas, GPUs, address.")],
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster, such as 10.0.0.1:6379.", show_default="this machine's, RAY_ADDRESS"
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the file and the cluster.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait until all replicas serve.")
    ] = 1800.0,
) -> None:
    """Serve models as replicas on a Ray cluster, or update what runs there, without a pause.

    Needs the extra `ray`. docs/many-machines.md has the file's fields. Ray Serve keeps the
    application running after the command has ended; `serve shutdown` ends it.
    """
    from soloist.cli import deploying

    deploying.deploy(config, address, checks_only=check, timeout_s=timeout)
