"""The other implementations that `bench_step.py` compares with, each in several settings."""

import functools
import itertools
import time

import torch
import torch.nn.functional as F

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fastest(peer: str, config, tokens: torch.Tensor, precision: str):
    """The fastest setting of a peer by its second step, as (name of the setting, step function)."""
    best = None
    for setting, build in {"transformers": transformers_settings, "torchtitan": torchtitan_settings}[peer](config):
        try:
            step = training_step(*build(DTYPES[precision]), tokens)
            step()
            begin = time.perf_counter()
            step()
            seconds = time.perf_counter() - begin
        except Exception as error:  # compilers fail in many ways; what runs nowhere is said below
            print(f"{peer} {setting}: does not run here ({str(error).splitlines()[0][:100]})", flush=True)
            continue
        print(f"{peer} {precision} {setting}: {seconds:.2f} s", flush=True)
        if best is None or seconds < best[0]:
            best = (seconds, setting, build)
        del step
    if best is None:
        raise ImportError("none of its settings runs here")
    _, setting, build = best
    step = training_step(*build(DTYPES[precision]), tokens)
    step(), step()
    return setting, step


def training_step(model, logits_of, tokens: torch.Tensor):
    """Forward, mean cross-entropy, backward, clip, fused AdamW: what every training script does with such a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    length = tokens.shape[1] - 1
    inputs, targets = tokens[:, :length], tokens[:, 1:].reshape(-1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(logits_of(inputs).flatten(0, 1).float(), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def transformers_settings(c):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    def build(attention, experts):
        def make(dtype):
            config = DeepseekV3Config(
                vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
                moe_intermediate_size=c.moe_intermediate_size, num_hidden_layers=c.num_hidden_layers,
                num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_attention_heads,
                n_shared_experts=c.n_shared_experts, n_routed_experts=c.n_routed_experts,
                routed_scaling_factor=c.routed_scaling_factor, kv_lora_rank=c.kv_lora_rank, q_lora_rank=c.q_lora_rank,
                qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim, qk_nope_head_dim=c.qk_nope_head_dim,
                n_group=c.n_group, topk_group=c.topk_group, num_experts_per_tok=c.num_experts_per_tok,
                first_k_dense_replace=c.first_k_dense_replace, norm_topk_prob=c.norm_topk_prob, use_cache=False,
                max_position_embeddings=c.max_position_embeddings, attn_implementation=attention,
                experts_implementation=experts,
            )
            model = DeepseekV3ForCausalLM(config).to(dtype).train()
            return model, lambda inputs: model(input_ids=inputs, use_cache=False).logits

        return make

    for attention, experts in itertools.product(("sdpa", "eager"), ("grouped_mm", "eager")):
        yield f"{attention} attention, {experts} experts", build(attention, experts)


def torchtitan_settings(c):
    """torchtitan 0.2, the last with SDPA: flex attention has no backward pass on a CPU."""
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3ModelArgs
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.moe import utils as moe_utils

    # Two things of it exist on CUDA only: the kernel that orders tokens has a switch, and its router counts tokens
    # with an integer histogram.
    moe_utils.generate_permute_indices = functools.partial(moe_utils.generate_permute_indices, use_cpu=True)
    histc = torch.histc
    torch.histc = lambda x, **kwargs: histc(x.float(), **kwargs).to(x.dtype)

    def build(compiled, grouped):
        def make(dtype):
            if grouped and dtype != torch.bfloat16:
                raise ValueError("its grouped experts compute in BF16 whatever the precision")
            arguments = DeepSeekV3ModelArgs(
                vocab_size=c.vocab_size, dim=c.hidden_size, inter_dim=c.intermediate_size,
                moe_inter_dim=c.moe_intermediate_size, n_layers=c.num_hidden_layers, n_dense_layers=c.first_k_dense_replace,
                n_heads=c.num_attention_heads, q_lora_rank=c.q_lora_rank or 0, kv_lora_rank=c.kv_lora_rank,
                qk_nope_head_dim=c.qk_nope_head_dim, qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim,
                max_seq_len=c.max_position_embeddings, rope_theta=c.rope_theta, rope_factor=1.0, norm_eps=c.rms_norm_eps,
                moe_args=MoEArgs(
                    num_experts=c.n_routed_experts, num_shared_experts=c.n_shared_experts, top_k=c.num_experts_per_tok,
                    score_func=c.scoring_func, route_norm=c.norm_topk_prob, route_scale=c.routed_scaling_factor,
                    num_expert_groups=c.n_group, num_limited_groups=c.topk_group, score_before_experts=False,
                    use_grouped_mm=grouped,
                ),
            )
            arguments.moe_impl = "standard"  # what its trainer sets from the job's configuration
            model = DeepSeekV3Model(arguments).train()
            with torch.no_grad():
                model.init_weights()
            for parameter in model.parameters():  # not .to(dtype): it would cut the complex RoPE table
                parameter.data = parameter.data.to(dtype)
            if compiled:
                torch._dynamo.config.capture_scalar_outputs = True
                for name, layer in model.layers.items():
                    model.layers[name] = torch.compile(layer)
            return model, model

        return make

    for compiled, grouped in itertools.product((False, True), (True, False)):
        name = f"blocks {'compiled' if compiled else 'eager'}, {'grouped_mm' if grouped else 'looped'} experts"
        yield name, build(compiled, grouped)
