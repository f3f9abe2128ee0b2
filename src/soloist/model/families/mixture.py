"""What families with mixtures of experts share: counts, routers, dense layers, tensors."""

from soloist.errors import WrongType
from soloist.model.config import Mixture, Mlp, Router
from soloist.model.expert_files import ExpertNames
from soloist.model.reading import Fields
from soloist.model.tensors import Source, TensorSpec

# Under which files say how many experts a layer has.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# In all layers. Published models have some 30,000; more than these would take seconds to describe.
MOST_EXPERTS = 1 << 17

# Of training alone.
OF_TRAINING = ("output_router_logits", "router_aux_loss_coef")


def read_counts(fields: Fields, usual: str) -> tuple[int, int]:
    """How many experts a layer has, and how many a token chooses.

    Args:
        fields: the configuration.
        usual: the name of the first number in files of the family; newer ones may have others.

    Raises:
        ConfigError: one is missing, two names differ, or a token chooses more than there are.
    """
    found = [name for name in COUNTS if name in fields]
    name = usual if usual in found or not found else found[0]
    experts = fields.integer(name)
    for other in found:
        fields.only(other, experts)
    if experts * fields.num_layers() > MOST_EXPERTS:
        allowed = f"at most {MOST_EXPERTS:,} in all layers together"
        raise WrongType(fields.file, fields.path(name), experts, allowed)
    chosen = fields.integer("num_experts_per_tok")
    if chosen > experts:
        allowed = f"at most the {experts} experts that there are"
        raise WrongType(fields.file, fields.path("num_experts_per_tok"), chosen, allowed)
    return experts, chosen


def read_softmax_router(fields: Fields) -> Router:
    """A softmax over all experts, of which the highest are chosen; normalised if the file says."""
    experts, chosen = read_counts(fields, "num_experts")
    fields.ignore(*OF_TRAINING)
    return Router(experts, chosen, normalises=fields.flag("norm_topk_prob", default=False))


def read_grouped_router(fields: Fields) -> Router:
    """A sigmoid of each expert, corrected for the choice, in groups of which some are kept."""
    fields.ignore(*OF_TRAINING)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    experts, chosen = read_counts(fields, "n_routed_experts")
    groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    # The rank of a group is a sum of two scores.
    if experts % groups or (groups > 1 and experts // groups < 2):
        allowed = f"a divisor of {experts} experts that leaves at least 2 to a group"
        raise WrongType(fields.file, fields.path("n_group"), groups, allowed)
    if kept > groups:
        allowed = f"at most the {groups} groups that there are"
        raise WrongType(fields.file, fields.path("topk_group"), kept, allowed)
    if chosen > kept * experts // groups:
        allowed = f"at most the {kept * experts // groups} experts of {kept} groups"
        raise WrongType(fields.file, fields.path("num_experts_per_tok"), chosen, allowed)
    return Router(
        experts,
        chosen,
        scores="sigmoid",
        is_corrected=True,
        num_groups=groups,
        num_groups_kept=kept,
        normalises=fields.flag("norm_topk_prob", default=True),
        least_sum=1e-20,
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def qwen_layers(fields: Fields, mixture: Mixture) -> tuple[Mlp | Mixture, ...]:
    """Experts in every `decoder_sparse_step` layers, but not in those that are named."""
    num_layers, step = fields.num_layers(), fields.integer("decoder_sparse_step", 1)
    named = fields.integers("mlp_only_layers", [])
    beyond = [i for i in named if i >= num_layers]
    if beyond:
        raise fields.unsupported("mlp_only_layers", beyond[0], f"0 … {num_layers - 1}")
    dense = [i in named or bool((i + 1) % step) for i in range(num_layers)]
    if not any(dense):
        fields.ignore("intermediate_size")  # says nothing where all layers have experts
        return (mixture,) * num_layers
    mlp = Mlp(fields.integer("intermediate_size"))
    return tuple(mlp if is_dense else mixture for is_dense in dense)


def mixture_tensors(
    theirs: str, ours: str, mixture: Mixture, names: ExpertNames, hidden: int
) -> list[TensorSpec]:
    """Of one layer; what routers multiply with stays in fp32.

    Args:
        theirs: before the names in checkpoints.
        ours: before the engine's.
        mixture: the layer's.
        names: in the family's checkpoints.
        hidden: H.
    """
    block, router = f"{theirs}{names.block}.", mixture.router

    def exact(name: str, source: str, *shape: int) -> TensorSpec:
        return TensorSpec(ours + name, (Source(block + source, shape),), is_exact=True)

    specs = [exact("router", "gate.weight", router.num_experts, hidden)]
    if router.is_corrected:
        bias = "gate.e_score_correction_bias"
        specs.append(exact("router_correction", bias, router.num_experts))
    if mixture.shared is not None:
        parts = (f"{block}{names.shared}.{part}_proj.weight" for part in ("gate", "up", "down"))
        specs += _mlp(f"{ours}shared.", tuple(parts), mixture.shared, hidden)
        if mixture.gates_shared:
            specs.append(exact("shared_gate", f"{names.shared}_gate.weight", 1, hidden))
    for expert in range(router.num_experts):
        at = f"{block}experts.{expert}."
        sources = tuple(f"{at}{part}.weight" for part in (names.gate, names.up, names.down))
        specs += _mlp(f"{ours}experts.{expert}.", sources, mixture.expert, hidden, expert)
    return specs


def _mlp(
    ours: str, sources: tuple[str, ...], mlp: Mlp, hidden: int, expert: int | None = None
) -> list[TensorSpec]:
    gate, up, down = sources
    ffn = mlp.intermediate_size
    rows = (Source(gate, (ffn, hidden)), Source(up, (ffn, hidden)))
    return [
        TensorSpec(f"{ours}gate_up", rows, expert=expert),
        TensorSpec(f"{ours}down", (Source(down, (hidden, ffn)),), expert=expert),
    ]
