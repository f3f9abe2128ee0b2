"""Whether a chat template can do no more than pass over what it is given, a few times.

Such a template may be rendered wherever a short request is read. The answer is no wherever it is
not plainly yes: for macros, ranges, products, nested loops over anything but a part of the outer
loop's item, texts that grow by themselves in a loop, and for calls and filters that are not listed.
"""

from jinja2 import Environment, TemplateError, nodes

_FILTERS = frozenset(
    {"trim", "tojson", "length", "count", "default", "upper", "lower", "string", "safe", "first",
     "last", "items", "list", "capitalize", "title"}
)  # fmt: skip
_METHODS = frozenset(
    {"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "upper", "lower", "title",
     "items", "keys", "values", "get"}
)  # fmt: skip
_FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace"})

_ALLOWED = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.NSRef, nodes.Const,
    nodes.If, nodes.For, nodes.Assign, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter,
    nodes.Test, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.CondExpr,
    nodes.Call, nodes.Keyword, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Concat,
    nodes.Add, nodes.Sub, nodes.Neg, nodes.Mod, nodes.Continue, nodes.Break,
)  # fmt: skip


# Characters of a template, and places in it that may make a text longer, each so many times.
_MOST_SOURCE, _MOST_REPLACED, _MOST_TIMES = 65_536, 2, 8


def is_bounded(environment: Environment, source: str) -> bool:
    """Whether rendering `source` takes a time and a memory that its input bounds."""
    if len(source) > _MOST_SOURCE:
        return False
    try:
        tree = environment.parse(source)
    except TemplateError:
        return False
    replaced = [one for one in tree.find_all(nodes.Filter) if one.name == "replace"]
    return len(replaced) <= _MOST_REPLACED and _is_bounded(tree, ())


def _is_bounded(node: nodes.Node, loops: tuple[frozenset[str], ...]) -> bool:
    """`loops` has the names that each loop around the node sets."""
    if not isinstance(node, _ALLOWED) or not _is_harmless(node, loops):
        return False
    if isinstance(node, nodes.For):
        if node.recursive or (loops and _root(node.iter) not in loops[-1]):
            return False
        targets = [node.target, *node.target.find_all(nodes.Name)]
        loops = (*loops, frozenset(x.name for x in targets if isinstance(x, nodes.Name)))
    return all(_is_bounded(child, loops) for child in node.iter_child_nodes())


def _is_harmless(node: nodes.Node, loops: tuple[frozenset[str], ...]) -> bool:
    match node:
        case nodes.Filter(
            name="replace", args=[nodes.Const(value=str(old)), nodes.Const(value=str(new))]
        ):
            return len(new) <= _MOST_TIMES * len(old) and not node.kwargs
        case nodes.Filter():
            given = [*node.args, *(x.value for x in node.kwargs)]
            return node.name in _FILTERS and all(map(_is_small, given))
        case nodes.Call(node=nodes.Name(name=name)):
            return name in _FUNCTIONS
        case nodes.Call(node=nodes.Getattr(attr=attr)):
            return attr in _METHODS
        case nodes.Call():
            return False
        case nodes.Mod():  # of texts it would format
            return isinstance(node.left, nodes.Getattr) and _root(node.left) == "loop"
        case nodes.Assign():
            return _sets_little(node, loops)
    return True


def _sets_little(node: nodes.Assign, loops: tuple[frozenset[str], ...]) -> bool:
    """Whether an assignment leaves functions and loops what they are, and makes nothing grow."""
    targets = [node.target, *node.target.find_all(nodes.Name)]
    names = {x.name for x in targets if isinstance(x, nodes.Name)}
    if names & (_FUNCTIONS | {"loop"}):
        return False
    if any(names & loop for loop in loops) and names != {_root(node.node)}:  # else a part of itself
        return False
    return not loops or _grows_little(node.node)


def _is_small(value: nodes.Expr) -> bool:
    """Whether an argument is written out and no large number."""
    match value:
        case nodes.Const(value=str() | bool() | None):
            return True
        case nodes.Const(value=int(number)):
            return 0 <= number <= _MOST_TIMES
    return False


def _grows_little(value: nodes.Node) -> bool:
    """Whether a value that is set in a loop has at most one part that is not written out."""
    parts = [value, *value.find_all(nodes.Node)]
    if any(isinstance(x, nodes.Filter) and x.name == "replace" for x in parts):
        return False
    if any(isinstance(x, nodes.Concat | nodes.Add) for x in parts):
        return sum(isinstance(x, nodes.Name) for x in parts) <= 1
    return not any(isinstance(x, nodes.List | nodes.Tuple | nodes.Dict) for x in parts)


def _root(node: nodes.Node | None) -> str:
    """The name that an expression is a part of."""
    while isinstance(node, nodes.Getattr | nodes.Getitem | nodes.Filter | nodes.Call):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else ""
