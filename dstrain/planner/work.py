"""What the phases of one unit compute for one micro-batch: floating-point operations, and bytes past the products.

Products are counted exactly. `moved` is coarse: every element-wise operation between two products reads its input and
writes its output once in the compute type, weights are read once a pass, and a weight gradient reads and writes its
accumulator. Kernel launches, small products' low rates and the time of sorting are left out.
"""

from dataclasses import dataclass

from dstrain.config.schema import ModelConfig
from dstrain.model.loss import chunk_rows
from dstrain.planner.job import Job


@dataclass(frozen=True)
class Work:
    linear: float = 0  # FLOPs of products that are FP8 in an FP8 run
    wide: float = 0  # FLOPs of the others
    core: float = 0  # FLOPs of the attention core
    moved: float = 0  # bytes to and from memory

    def __add__(self, other: "Work") -> "Work":
        return Work(self.linear + other.linear, self.wide + other.wide, self.core + other.core,
                    self.moved + other.moved)

    @property
    def flops(self) -> float:
        return self.linear + self.wide + self.core


def attention_work(job: Job, is_moe: bool) -> dict[str, Work]:
    """F, B (gradients of inputs) and W (of weights) of the phase that ends with the router."""
    model, tokens, c = job.config.model, job.tokens, job.formats.compute
    heads, up, weights = model.num_attention_heads, _up_projections(model), _attention_weights(model)
    core = 2 * tokens * heads * (model.qk_head_dim + model.v_head_dim) * (job.config.data.sequence_length + 1) / 2
    gate = 2 * tokens * model.hidden_size * model.n_routed_experts if is_moe else 0
    qkv = heads * (2 * model.qk_head_dim + model.v_head_dim)
    passes = 6 * model.hidden_size + 4 * qkv + 3 * heads * model.v_head_dim
    moved = tokens * (c * passes + (8 * model.hidden_size if is_moe else 0)) + c * weights
    product = 2 * tokens * weights
    backward = Work(product, gate, 2.5 * core, 2 * moved)
    if job.formats.fp8:  # up-projections and the core's forward run again
        backward += Work(2 * tokens * up, 0, core, tokens * c * 4 * qkv)
    return {
        "F": Work(product, gate, core, moved),
        "B": backward,
        "W": Work(product, gate, 0, accumulated(job) * weights + tokens * c * (4 * model.hidden_size + 2 * qkv)),
    }


def experts_work(job: Job, is_moe: bool) -> dict[str, Work]:
    """F, B, W of a dense layer's FFN, or of a rank's routed experts and the shared one."""
    model, tokens, c = job.config.model, job.tokens, job.formats.compute
    hidden, inner = model.hidden_size, model.moe_intermediate_size
    if is_moe:
        shared = model.n_shared_experts
        width = job.rows * inner + tokens * shared * inner  # rows times what is inside an expert
        rows = job.rows + tokens
        weights = 3 * hidden * inner * (model.n_routed_experts // job.config.parallel.ep + shared)
    else:
        width, rows, weights = tokens * model.intermediate_size, tokens, 3 * hidden * model.intermediate_size
    product = 6 * hidden * width
    moved = c * (weights + 5 * width + 4 * rows * hidden)
    grads = accumulated(job) * weights + c * (4 * width + 3 * rows * hidden)
    return {"F": Work(product, 0, 0, moved), "B": Work(product, 0, 0, 2 * moved), "W": Work(product, 0, 0, grads)}


def accumulated(job: Job) -> int:
    """As `Formats.accumulated`, of a Linear that FP8 takes: its products add to the accumulator themselves."""
    return 2 * job.formats.main if job.formats.fp8 else job.formats.accumulated


def embed_work(job: Job) -> dict[str, Work]:
    size = job.tokens * job.config.model.hidden_size
    return {"F": Work(moved=2 * job.formats.compute * size), "B": Work(moved=3 * job.formats.main * size), "W": Work()}


def head_work(job: Job) -> dict[str, Work]:
    """The forward computes its gradients too, chunk by chunk; each chunk adds to the whole accumulator."""
    model, tokens = job.config.model, job.tokens
    table = model.vocab_size * model.hidden_size
    chunks = -(-tokens // chunk_rows(model.vocab_size, job.is_cuda))
    moved = 6 * job.formats.wide * tokens * model.vocab_size
    moved += chunks * table * (2 * job.formats.compute + job.formats.accumulated)
    norm = Work(moved=4 * job.formats.compute * tokens * model.hidden_size)
    return {"F": Work(wide=3 * 2 * tokens * table, moved=moved) + norm, "B": norm, "W": Work()}


def merge_work(job: Job) -> dict[str, Work]:
    """The entry of an MTP module: two norms and the projection of [embedding ; state]."""
    hidden, c = job.config.model.hidden_size, job.formats.compute
    product, moved = 4 * job.tokens * hidden**2, c * (job.tokens * 9 * hidden + 2 * hidden**2)
    grads = Work(wide=product, moved=2 * job.formats.accumulated * hidden**2)
    return {"F": Work(wide=product, moved=moved), "B": Work(wide=product, moved=2 * moved), "W": grads}


def _up_projections(model: ModelConfig) -> int:
    heads = model.num_attention_heads
    query = model.q_lora_rank * heads * model.qk_head_dim if model.q_lora_rank is not None else 0
    return query + model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)


def _attention_weights(model: ModelConfig) -> int:
    """Elements of attention's matrices."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    down = hidden * (heads * model.qk_head_dim if model.q_lora_rank is None else model.q_lora_rank)
    down += hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    return down + _up_projections(model) + heads * model.v_head_dim * hidden
