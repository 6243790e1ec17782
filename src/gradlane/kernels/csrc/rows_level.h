/* Rows of all ranks, and checks of single buffers, at one level of instructions. The units rows_*.c define LEVEL. */
#include "level_begin.h"
#if LEVEL_EXISTS
#include "rows_loops.h"
#include "finite_loops.h"
#endif
#include "level_end.h"
