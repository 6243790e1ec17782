"""Documents as ``gradlane bench``, ``train`` and ``plan`` write them, with figures made up from a formula."""

import math

LINKS = {"loopback": None, "1gbit": 1e9, "100mbit": 1e8}
RATIOS = {  # by which factor an arm sends less than dense; None sends nothing
    "ddp": 1,
    "Noop()": None,
    "Mean()": 1,
    "Cast(Mean(), float16)": 2,
    "Cast(Mean(), bfloat16)": 2,
    "ErrorFeedback(TopK(0.01))": 50,
}
TRAINED = {"ddp": 1, "Cast(Mean(), bfloat16)": 2, "PowerSGD(rank=4)": 12, "ErrorFeedback(TopK(0.01))": 50}
TRAINED["SignSGD()"] = 32
ODD_NAME = """Odd(<b>&"x'</b>)"""
TRACEBACK = """Traceback (most recent call last):
  File "strategy.py", line 7, in reduce
    votes = await all_reduce(bucket.flat.sign().half(), op="sum")
gradlane.errors.PeerFailed: rank 1 raised ValueError: 3 rows, but 4 were asked for"""
DENSE, COMPUTE = 37_699_488, 0.041


def made(command):
    versions = {"gradlane": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}
    machine = {"system": "Linux 6.1 x86_64", "cores": 2}
    return {"at": "2026-11-15T23:10:00+00:00", "command": command, **versions, **machine}


def bench_document(links=LINKS, ratios=RATIOS, ranks=(2,), ended="complete"):
    settings = {"model": "mlp9m", "parameters": 9424872, "bucket_mb": 25.0, "steps": 20, "warmup": 3}
    settings |= {"budget_s": 600, "threads": None, "links": list(links), "interleaved": True}
    command = " ".join(["gradlane bench", *(f"--link {link}" for link in links), "--steps 20"])
    document = {"kind": "bench", "format": 1, "made": made(command), "settings": settings, "ended": ended}
    document["results"] = [
        bench_result(arm, ratio, link, rate, count)
        for link, rate in links.items()
        for count in ranks
        for arm, ratio in ratios.items()
    ]
    return document


def bench_result(arm, ratio, link="100mbit", rate=1e8, ranks=2, buckets=3):
    sent = 0 if ratio is None else round(DENSE / ratio)
    wire, dense = sent * 8 / (rate or 8e9), DENSE * 8 / (rate or 8e9)
    median, base = (max(COMPUTE, 0.012 + seconds) + 0.002 for seconds in (wire, dense))
    result = {"link": link, "rate_bits": rate, "emulated": rate is not None, "note": "", "ranks": ranks}
    result |= {"arm": arm, "status": "ok", "detail": "", "steps": 20, "steps_s": [median] * 20}
    result |= {"median_s": median, "min_s": 0.98 * median, "cpu_s": 0.07, "exposed_s": median - COMPUTE}
    result |= {"ledger_bytes": sent, "interface_bytes": 1.003 * sent, "ratio": ratio or 1.0}
    result |= {"speedup": base / median, "of_limit": 0.93, "limit_s": 0.93 * median}
    if arm in ("ddp", "Noop()"):
        return result | {"phases": None, "timeline": None}
    phases = {"encode_s": 0.004, "queued_s": 0.4 * wire, "collective_s": wire, "decode_s": 0.002}
    steps = [rank_step(rank, wire, buckets, sent) for rank in range(ranks)]
    return result | {"phases": phases, "timeline": steps}


def rank_step(rank, wire, buckets, sent):
    requests, free = [], 0.0
    for bucket in range(buckets):
        start = 0.012 + bucket * 0.029 / buckets + 0.001 * rank
        queued = max(0.0, free - start - 0.0015)
        request = {"bucket": bucket, "phase": 0, "kind": "all_reduce", "payload_bytes": sent // buckets}
        request |= {"start_s": start, "encode_s": 0.0015, "queued_s": queued}
        requests.append(request | {"collective_s": wire / buckets, "decode_s": 0.0008})
        free = start + 0.0015 + queued + wire / buckets
    end = max(COMPUTE, free + 0.0008)
    return {"rank": rank, "step": 12, "backward_s": COMPUTE, "end_s": end, "requests": requests}


def failed_result(arm, status, detail, link="100mbit", rate=1e8):
    """As of an arm that never finished a step: no figures at all."""
    result = bench_result(arm, 1, link, rate)
    kept = ("link", "rate_bits", "emulated", "note", "ranks", "arm")
    return {key: result[key] if key in kept else None for key in result} | {
        "status": status,
        "detail": detail,
    }


def train_document(results=None, target=3.25):
    settings = {"task": "bytes", "ranks": 2, "steps": 150, "seeds": 3, "optimizer": "sgd", "lr": 0.1}
    document = {"kind": "train", "format": 1, "made": made("gradlane train --link 100mbit --seeds 3")}
    document |= {"settings": settings, "ended": "complete", "unit": "bits/byte", "target": target}
    document["link"] = {"name": "100mbit", "rate_bits": 1e8, "emulated": True, "note": ""}
    document["results"] = results or [train_result(arm, ratio) for arm, ratio in TRAINED.items()]
    return document


def train_result(arm, ratio, seeds=(0, 1, 2), steps=150, diverged=False):
    runs = [train_run(seed, ratio, steps, diverged) for seed in seeds]
    first, last = runs[0], runs[0]["loss"][-1]
    result = {"arm": arm, "status": "ok", "detail": "", "final_loss": last, "runs": runs}
    result |= {"gap": None if last is None else last - train_run(0, 1, steps)["loss"][-1]}
    result |= {"gap_interval": 0.004 if len(seeds) > 1 and last is not None else None}
    result |= {"bytes_per_step": first["bytes"][-1] / steps, "seconds_per_step": first["seconds"][-1] / steps}
    if arm != "ddp":
        result["phases"] = {"encode_s": 0.004, "queued_s": 0.0, "collective_s": 0.01, "decode_s": 0.002}
    there = next((at for at, loss in enumerate(first["loss"]) if loss is not None and loss <= 3.25), None)
    for key, name in (("to_target_s", "seconds"), ("to_target_bytes", "bytes"), ("to_target_steps", "steps")):
        result[key] = None if there is None else first[name][there]
    return result


def train_run(seed, ratio, steps, diverged=False):
    at = sorted({*range(0, steps, 10), steps})
    floor = 3.1 + 0.03 * math.log(ratio or 200)
    loss = [floor + 4.9 * math.exp(-step / 35) + 0.05 * math.sin(1.7 * seed + step / 9) for step in at]
    if diverged:
        loss = [
            value if step < 40 else 1e4 if step < 60 else None for value, step in zip(loss, at, strict=True)
        ]
    sent = 0 if ratio is None else 1_102_848 / ratio
    curve = {"bytes": [step * sent for step in at], "seconds": [step * (0.02 + sent * 8e-8) for step in at]}
    return {"seed": seed, "status": "ok", "steps": at, "loss": loss, **curve}


def crashed_training(arm="MajorityVote()"):
    nothing = dict.fromkeys(train_result(arm, 1))
    return nothing | {"arm": arm, "status": "crashed", "detail": TRACEBACK, "runs": []}


PLANNED = {"ddp": 1, "Mean()": 1, "Cast(Mean(), bfloat16)": 2, "ErrorFeedback(PowerSGD(4))": 100}


def plan_document(rate=1e9, ratios=PLANNED, ranks=2, more=(8, 64)):
    """A step is compute, and the time of the bytes by the rate."""

    def seconds(ratio, bits, others=1.0):
        return COMPUTE + 0.001 + DENSE * 8 * others / (ratio * bits)

    settings = {"model": "mlp9m", "parameters": 9424872, "ranks": ranks, "per_node": 1, "link": "1gbit"}
    document = {"kind": "plan", "format": 1, "made": made("gradlane plan --link 1gbit"), "settings": settings}
    document |= {"ended": "complete", "note": "", "error": 0.05, "off": False, "ranks": ranks}
    document |= {"rate_bits": rate, "latency_s": 0.001, "compute_s": COMPUTE}
    document["results"] = [plan_result(arm, ratio, seconds(ratio, rate), seconds(1, rate), rate)
                           for arm, ratio in ratios.items()]  # fmt: skip
    rates = [rate * 10 ** (step / 4 - 2) for step in range(13)]
    lines = {arm: [seconds(ratio, bits) for bits in rates] for arm, ratio in ratios.items()}
    document["sweep"] = {"rates_bits": rates, "seconds": lines}
    document["more_ranks"] = [
        {"ranks": n, "arm": arm, "seconds": took, "low_s": 0.9 * took, "high_s": 1.2 * took,
         "speedup": seconds(1, rate, 2 - 2 / n) / took}
        for n in more for arm, ratio in ratios.items() for took in [seconds(ratio, rate, 2 - 2 / n)]
    ]  # fmt: skip
    return document


def plan_result(arm, ratio, took, dense, rate):
    pays = dense / took > 1.1
    result = {
        "arm": arm,
        "loss": {1: "exact", 2: "bf16"}.get(ratio, "lossy"),
        "node_bytes": round(DENSE / ratio),
    }
    result |= {"seconds": took, "exposed_s": took - COMPUTE, "work_s": 0.001, "network_s": took - COMPUTE}
    result |= {"latency_s": 0.001, "speedup": dense / took, "why": "", "pays_at_any_rate": False}
    result |= {"verdict": "" if arm == "ddp" else "pays" if pays else "even"}
    return result | {"pays_below_bits": 5 * rate if pays else None}
