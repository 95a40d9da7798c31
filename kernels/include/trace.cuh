// trace.cuh: the names of a kernel's actions, written where they happen.
//
//     TRACE_BLOCK(b, h, i);    once: which block the actions belong to (batch, head, row block)
//     TRACE(load_k, j);        right before the lines that perform load_k on tile j
//     TRACE(scores, j, i);     the variables of two loops, outermost first
//
// Both compile to nothing. The actions' names are numbered in their order of appearance when the source is assembled, so a name
// is written in the kernel and nowhere else; an action's lines run from its TRACE to the next.
#pragma once

#define TRACE_BLOCK(batch, head, tile) ((void)0)
#define TRACE(action, ...) ((void)0)
