/* windows.c: what a library without the C runtime's start-up code needs where ziglang links it. Compiled, not run by the tests. */
#include <stdarg.h>
#include <stddef.h>
__declspec(dllimport) int __stdio_common_vsprintf(unsigned long long, char*, size_t, const char*, void*, va_list);
int DllMainCRTStartup(void* handle, unsigned reason, void* reserved) { return 1; }
int _fltused = 1;
int vsnprintf(char* to, size_t n, const char* format, va_list values) { return __stdio_common_vsprintf(2, to, n, format, 0, values); }
int snprintf(char* to, size_t n, const char* format, ...) {
    va_list values;
    va_start(values, format);
    int written = vsnprintf(to, n, format, values);
    va_end(values);
    return written;
}
