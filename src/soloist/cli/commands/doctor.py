"""`soloist doctor`: its option."""

from soloist.cli import options as o


def doctor(json: o.Json = False) -> None:
    """Show what this machine has and what runs on it, in words to paste into an issue.

    Names of users and hosts are left out, and the home folder is written as ~. Exit status 1 if no
    model can run here.
    """
    from soloist.cli import doctor as diagnosis

    diagnosis.show(as_json=json)
