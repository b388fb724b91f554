"""Messages of a small engine."""

from rooftune.policies import wire


def state(**changes: object) -> wire.State:
    """Budget 1 to 512, 512 in force, no lease."""
    return wire.State.model_validate(
        {
            "engine": "test",
            "engine_version": "1",
            "model": "m",
            "boot_id": "boot",
            "now_s": 100.0,
            "envelope": {
                "ceiling_tokens": 512,
                "max_running": 8,
                "model_tokens": 4096,
                "kv_blocks": 100,
                "kv_block_tokens": 16,
                "chunking": True,
            },
            "knobs": (
                {"name": "step_tokens", "mode": "live", "value": 512, "boot": 512, "min": 1, "max": 512},
                {"name": "chunk_cap_tokens", "mode": "live", "value": 0, "boot": 0, "min": 0, "max": 512},
                {"name": "max_partial_prefills", "mode": "absent"},
            ),
            "revision": 0,
            "blocked": False,
            "lease": None,
            "step": 0,
        }
        | changes
    )


PUSH = wire.PushRequest(
    knobs=wire.Knobs(step_tokens=64), lease_s=30.0, expected_revision=0, actor="test", reason="because"
)
TAKEN = wire.PushAnswer(revision=1, effective_from_step=7)


def refusal(code: str, message: str = "no") -> wire.Refusal:
    return wire.Refusal.model_validate({"code": code, "revision": 3, "message": message})
