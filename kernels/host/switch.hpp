// switch.hpp: from one stack to another. Own assembly for x86-64 and arm64 (System V, AAPCS: Linux, macOS), fibers on Windows, ucontext
// elsewhere or with -DFV_UCONTEXT. Run by the tests: Linux x86-64, both its own assembly and ucontext. The others are compiled, not run.
#pragma once
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(FV_UCONTEXT)
#define FV_UCONTEXT
#endif
#if defined(FV_UCONTEXT)
#include <ucontext.h>
#endif
#endif

namespace fv {

constexpr size_t STACK_BYTES = 128 << 10, GUARD_BYTES = 64 << 10;  // the guard ends at the stack's low end: an overflow is a fault

struct Context {
#if defined(_WIN32)
    void* fiber = nullptr;
#elif defined(FV_UCONTEXT)
    ucontext_t context;
    char* stack = nullptr;
#else
    void* sp = nullptr;
    char* stack = nullptr;
#endif
};

#if !defined(_WIN32)
inline char* new_stack() {
    char* low = static_cast<char*>(mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
    if (low == static_cast<char*>(MAP_FAILED)) abort();
    mprotect(low, GUARD_BYTES, PROT_NONE);
    return low + GUARD_BYTES;
}
#endif

#if defined(_WIN32)
inline void start(Context& c, void (*main)()) {
    if (c.fiber) DeleteFiber(c.fiber);
    c.fiber = CreateFiber(STACK_BYTES, [](void* f) { reinterpret_cast<void (*)()>(f)(); }, reinterpret_cast<void*>(main));
}
inline void jump(Context& from, Context& to) {
    if (!from.fiber) from.fiber = IsThreadAFiber() ? GetCurrentFiber() : ConvertThreadToFiber(nullptr);
    SwitchToFiber(to.fiber);
}
inline bool on_stack(const Context&, const void* p) {  // the running fiber's own
    const char here = 0;
    const ptrdiff_t d = static_cast<const char*>(p) - &here;
    return d > -(ptrdiff_t)STACK_BYTES && d < (ptrdiff_t)STACK_BYTES;
}
#elif defined(FV_UCONTEXT)
inline void start(Context& c, void (*main)()) {
    if (!c.stack) c.stack = new_stack();
    getcontext(&c.context);
    c.context.uc_stack.ss_sp = c.stack;
    c.context.uc_stack.ss_size = STACK_BYTES;
    c.context.uc_link = nullptr;
    makecontext(&c.context, main, 0);
}
inline void jump(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#else
#if defined(__APPLE__)
#define FV_SYMBOL(name) "_" #name
#else
#define FV_SYMBOL(name) #name
#endif
extern "C" FV_LOCAL void fv_jump(void** save, void* to);  // pushes what a call preserves, swaps stack pointers, pops
#if defined(__x86_64__)
#if defined(FV_DEFINE_JUMP)  // in one file only
asm(".text\n.globl " FV_SYMBOL(fv_jump) "\n" FV_SYMBOL(fv_jump) ":\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#endif
inline void start(Context& c, void (*main)()) {
    if (!c.stack) c.stack = new_stack();
    void** top = reinterpret_cast<void**>(c.stack + STACK_BYTES);
    *--top = nullptr;  // main's return address: it never returns, and at its entry the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(main);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    c.sp = top;
}
#else
#if defined(FV_DEFINE_JUMP)  // in one file only
asm(".text\n.globl " FV_SYMBOL(fv_jump) "\n.p2align 2\n" FV_SYMBOL(fv_jump) ":\n"
    "sub sp,sp,#160\n"
    "stp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\n"
    "stp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\n"
    "mov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\n"
    "ldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\n"
    "add sp,sp,#160\nret\n");
#endif
inline void start(Context& c, void (*main)()) {
    if (!c.stack) c.stack = new_stack();
    void** low = reinterpret_cast<void**>(c.stack + STACK_BYTES - 160);
    memset(low, 0, 160);
    low[11] = reinterpret_cast<void*>(main);  // x30, where the first jump returns to
    c.sp = low;
}
#endif
inline void jump(Context& from, Context& to) { fv_jump(&from.sp, to.sp); }
#endif
// A stack is two mappings of the process, and every compiled kernel has its own runtime: what is kept between launches adds up.
inline void finish(Context& c) {
#if defined(_WIN32)
    if (c.fiber) DeleteFiber(c.fiber);
    c.fiber = nullptr;
#else
    if (c.stack) munmap(c.stack - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
    c.stack = nullptr;
#endif
}
#if !defined(_WIN32)
inline bool on_stack(const Context& c, const void* p) {
    const char* at = static_cast<const char*>(p);
    return at >= c.stack - GUARD_BYTES && at < c.stack + STACK_BYTES;
}
#endif

}  // namespace fv
