#define LEVEL AVX512
#include "lowrank_level.h"
