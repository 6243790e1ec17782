#define LEVEL PORTABLE
#include "lowrank_level.h"
