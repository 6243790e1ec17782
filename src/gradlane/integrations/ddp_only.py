"""The error message for a Lightning Trainer or Fabric whose strategy is not DDP."""


def needs_ddp(who: str, strategy: str) -> str:
    return (
        f'gradlane works on DDP models, the strategy of this {who} is {strategy}; use {who}(strategy="ddp")'
    )
