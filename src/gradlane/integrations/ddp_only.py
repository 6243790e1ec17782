"""What Lightning's Trainer and Fabric are told when they are not set to DDP."""


def needs_ddp(who: str, strategy: str) -> str:
    return (
        f'gradlane works on DDP models, the strategy of this {who} is {strategy}; use {who}(strategy="ddp")'
    )
