#define LEVEL AVX2
#include "lowrank_level.h"
