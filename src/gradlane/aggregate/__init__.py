"""How the contributions of all ranks become one gradient: functions from [world, n] to [n]."""
