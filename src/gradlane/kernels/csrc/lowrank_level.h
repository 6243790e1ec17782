/* Low-rank compression at one level of instructions. The units lowrank_*.c define LEVEL. */
#include "level_begin.h"
#if LEVEL_EXISTS
#include "products_loops.h"
#include "expand_loops.h"
#include "orthonormal_loops.h"
#include "bf16_residual_loops.h"
#endif
#include "level_end.h"
