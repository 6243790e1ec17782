/* Block codecs and top-k at one level of instructions. The units codecs_*.c define LEVEL. */
#include "level_begin.h"
#if LEVEL_EXISTS
#include "blocks_loops.h"
#include "topk_loops.h"
#endif
#include "level_end.h"
