"""Time stamps that the kernel takes in a traced round: what each of them ends."""

from soloist.megakernel.plan import Plan

# In the order of the kernel's `mark` calls; each names the stretch of time that ends with it.
_FIRST = ("start", "embed")
_LAYER = (
    "qkv wait", "qkv multiply", "qkv finish",
    "attention wait", "attention pages", "attention store", "attention merge",
    "output wait", "output multiply", "output finish",
    "gate_up wait", "gate_up multiply", "gate_up finish",
    "down wait", "down multiply", "down finish",
)  # fmt: skip
_LAST = ("head wait", "head multiply", "choose wait", "choose", "conclude")


def mark_names(plan: Plan) -> list[str]:
    """The stretches of a round, in order."""
    return [*_FIRST, *(_LAYER * plan.model.num_layers), *_LAST]


def num_marks(plan: Plan) -> int:
    """Time stamps of one block."""
    return len(mark_names(plan))
