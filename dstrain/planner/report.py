"""A plan for people, as lines, and for programs, as one JSON object (DESIGN §6 lists its keys)."""

from dstrain.planner.memory import GIB
from dstrain.planner.plan import Plan, Run


def as_json(plan: Plan, run: Run) -> dict:
    """Plain containers. Worst rank for memory; seconds and fractions of the step at the full batch."""
    counts, step, job = plan.counts(), plan.step, plan.job
    pair = step.pair
    return {
        "model": job.config.model.name,
        "cluster": job.cluster.name,
        "gpus": job.cluster.gpus,
        "precision": job.config.precision.name,
        "phases": job.config.phases,
        "parallel": {"pp": job.layout.mesh.pp, "ep": job.layout.mesh.ep, "dp": job.layout.mesh.dp,
                     "schedule": job.config.parallel.schedule, "recompute": job.config.parallel.recompute,
                     "stages": [len(units) for units in job.layout.partition.stages]},
        "micro_batches": plan.schedule.micro_batches,
        "parameters": {"main": counts.main, "per_mtp": counts.per_mtp, "total": counts.total,
                       "activated": counts.activated},
        "memory_gib": plan.memory[plan.worst].gib(),
        "memory_rank": plan.worst,
        "memory_gib_by_pipeline_rank": [memory.gib()["total"] for memory in plan.memory],
        "fits": plan.over <= 0,
        "sent_gib": {what: {link: size / GIB for link, size in links.items()} for what, links in plan.sent().items()},
        "step_seconds": step.seconds,
        "step_parts": step.parts,
        "step_rank": step.rank,
        "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
        "mfu": plan.mfu,
        "gpu_hours_per_trillion_tokens": plan.gpu_hours_per_trillion_tokens,
        "phase_ms": {str(phase): seconds * 1e3 for phase, seconds in plan.times.blocks[True].phases.items()},
        "pair_ms": pair.seconds * 1e3 if pair else None,
        "hidden_fraction": (pair.hidden / pair.communication if pair.communication else 1.0) if pair else 0.0,
        "bubble_fraction": step.parts["bubble"] / step.seconds,
        "run": {"tokens": run.tokens, "steps": run.steps, "gpu_hours": run.gpu_hours, "price": run.price,
                "days": run.gpu_hours / job.cluster.gpus / 24, "ramp_tokens": run.ramp_tokens,
                "ramp_gpu_hours": run.ramp_gpu_hours},
    }


def lines(plan: Plan, run: Run) -> list[str]:
    """The table."""
    found, job = as_json(plan, run), plan.job
    counts, memory, layout, cluster = found["parameters"], found["memory_gib"], found["parallel"], job.cluster
    source = f"phases as measured, {job.config.phases}" if job.config.phases else "phases by FLOPs and bytes"
    out = [
        f"{found['model']} on {cluster.gpus} GPUs of {cluster.name}, {found['precision']}; {source}",
        f"pp {layout['pp']} x dp {layout['dp']}, ep {layout['ep']}; {layout['schedule']}, {found['micro_batches']} "
        f"micro-batches of {job.config.batch.micro_sequences} x {job.config.data.sequence_length} tokens; units of the "
        f"stages {layout['stages']}",
        "",
        f"parameters   {counts['main']:,} main, {counts['activated']:,} activated, {counts['total']:,} with MTP",
        f"memory       {memory['total']:.1f} of {cluster.memory_gib:g} GiB on pipeline rank {plan.worst}: "
        + ", ".join(f"{kind} {size:.1f}" for kind, size in memory.items() if kind != "total"),
        f"step         {found['step_seconds']:.3f} s, {job.config.batch.sequences} sequences; parts on pipeline rank "
        f"{found['step_rank']}:",
    ]
    out += [f"  {seconds:10.3f} s  {seconds / found['step_seconds']:6.1%}  {part.replace('_', ' ')}"
            for part, seconds in found["step_parts"].items()]
    if plan.step.pair:
        hidden = found["hidden_fraction"]
        out.append(f"pair         {found['pair_ms']:.1f} ms, {hidden:.1%} of its communication hidden")
    times = ", ".join(f"{name} {time:.2f}" for name, time in found["phase_ms"].items())
    sent = ", ".join(f"{what} {links['slow'] + links['fast']:.1f} ({links['slow']:.1f} between nodes)"
                     for what, links in found["sent_gib"].items())
    speed, hours = found["tokens_per_second_per_gpu"], found["gpu_hours_per_trillion_tokens"]
    out += [
        f"phases       {times} ms a MoE layer",
        f"sent         GiB a step and GPU, the most of any: {sent}",
        f"speed        {speed:,.0f} tokens/s/GPU, mfu {found['mfu']:.1%} of the BF16 peak, "
        f"{hours:,.0f} GPU hours per trillion tokens",
        f"run          {run.tokens:,.0f} tokens, {run.steps:,} steps, {found['run']['days']:,.1f} days: "
        f"{run.gpu_hours:,.0f} GPU hours, price {run.price:,.0f}",
    ]
    if run.ramp_tokens:
        out.append(f"             of them {run.ramp_gpu_hours:,.0f} GPU hours on the way up the batch ramp, "
                   f"{run.ramp_tokens:,.0f} tokens")
    return [*out, "", *job.layout.partition.lines()]
