"""`soloist pull`, `list` and `rm`: their options."""

from typing import Annotated

import typer

from soloist.cli import options as o

_HubModel = Annotated[
    str, typer.Argument(help="A hub id: owner/name, or of a GGUF model owner/name:Q4_K_M.")
]


def pull(model: _HubModel, revision: o.Revision = None) -> None:
    """Fetch a model from the hub; an interrupted download goes on where it stopped.

    Only files that Soloist reads are fetched: safetensors, configuration, tokenizer and chat
    templates; or one GGUF model. The configuration comes first, and a model that Soloist cannot run
    costs no more.
    """
    from soloist.cli import catalogue

    catalogue.pull(model, revision)


def list_(json: o.Json = False) -> None:
    """List the models on this disk: size, format, whether each fits this machine, what runs it.

    These are the models of the hub's cache and the shipped ones. Nothing is loaded.
    """
    from soloist.cli import catalogue

    catalogue.show_list(as_json=json)


def rm(
    model: _HubModel,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """Remove a model from the hub's cache, all revisions of it, or one GGUF model.

    Says what is removed and how many bytes become free, then asks. Folders outside of the cache and
    shipped models are never touched.
    """
    from soloist.cli import catalogue

    catalogue.take_away(model, without_asking=yes)
