"""Which GGUF file of a folder or a repository is meant, by names alone. Pure."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from soloist.errors import GgufChoice
from soloist.gguf.names import SUFFIX, first_of, parts_of, stem_of

# Beside models lie projectors of images and what quantisers learned of activations.
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.IGNORECASE)
_TYPE = r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|F32|F16|BF16|FP16|MXFP4\w*|NVFP4\w*)"
_ENDS_IN_TYPE = re.compile(rf"(?:^|.*?[-._])(?P<tag>{_TYPE})", re.IGNORECASE)
_IS_TYPE = re.compile(_TYPE, re.IGNORECASE)


def models_in(names: Iterable[str]) -> list[str]:
    """The models among the names of files: of one in parts the first, if all parts are there."""
    found = {name for name in names if name.lower().endswith(SUFFIX)}
    return sorted(
        name
        for name in found
        if _path_of(name) == name
        and found.issuperset(parts(name))
        and not _NO_MODEL.search(PurePosixPath(name).stem)
    )


def parts(name: str) -> list[str]:
    """The names of all files of a model, beside its own."""
    path = PurePosixPath(name)
    return [str(path.with_name(part)) for part in parts_of(path.name)]


def tag_of(name: str) -> str:
    """What people call one of several files: 'Q4_K_M', or all of its name."""
    stem = stem_of(PurePosixPath(name).name)
    found = _ENDS_IN_TYPE.fullmatch(stem)
    return stem if found is None else found["tag"]


def distinct_tags(names: Iterable[str]) -> dict[str, str]:
    """The tag of each model, or all of its name where others have the same."""
    tags = {name: tag_of(name) for name in names}
    shared = [tag.lower() for tag in tags.values()]
    return {
        name: tag if shared.count(tag.lower()) == 1 else PurePosixPath(name).name
        for name, tag in tags.items()
    }


def choose(where: str, names: Iterable[str], tag: str | None) -> str:
    """The name of the file that is meant.

    Args:
        where: what people call the folder or repository.
        names: of its files, with '/' between folders.
        tag: a part of the file's name between '-', '.' or the ends, such as 'Q4_K_M'; or all of the
            name. None where nobody says.

    Raises:
        GgufChoice: no file, or several.
    """
    names = models_in(names)
    matching = names if tag is None else [name for name in names if _means(tag, name)]
    # 'Q4_K_M' is rather model-Q4_K_M.gguf than model-Q4_K_M-imatrix.gguf.
    if tag is not None and len(matching) > 1:
        closest = [name for name in matching if tag_of(name).lower() == tag.lower()]
        matching = closest or matching
    if len(matching) != 1:
        tags = distinct_tags(names)
        raise GgufChoice(where, tag, matching, names, tags[(matching or names)[0]] if names else "")
    return matching[0]


def _means(tag: str, name: str) -> bool:
    wanted, path = tag.lower(), PurePosixPath(name)
    stem = str(path.with_name(stem_of(path.name))).lower()
    if wanted in (name.lower(), path.name.lower(), stem):
        return True
    # A type may follow a '_', but is not cut at one: Q4_K is not Q4_K_M.
    before = "[-._/]" if _IS_TYPE.fullmatch(tag) else "[-./]"
    return re.search(rf"(?:^|{before}){re.escape(wanted)}(?:[-./]|$)", stem) is not None


def _path_of(name: str) -> str:
    path = PurePosixPath(name)
    return str(path.with_name(first_of(path.name)))
