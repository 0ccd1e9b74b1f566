/* Kernels of PyTorch operators over its stable C ABI. export/torch_ops.py declares the operators and calls these functions. */
#ifndef LEANFLEET_TORCH_ADAPTER_H_
#define LEANFLEET_TORCH_ADAPTER_H_

#include "capi/leanfleet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Finds PyTorch's functions through `handle`, what dlopen gave for a library that depends on libtorch. NULL: kernels can be
 * registered. Otherwise what stands in the way: the first function that is missing (PyTorch is older than 2.10), or this library's
 * C++ runtime. */
LEANFLEET_EXPORT const char* leanfleet_torch_attach(void* handle);

/* Registers a kernel for the operator DOMAIN::form at the dispatch key ("CPU" or "CUDA"). `op` names the operator of the
 * library, `mutating` the attribute that the form has on, NULL in the functional form. `fallback`: an operator of the same schema
 * that computes what has no kernel here. Returns 0, or a code as in leanfleet.h. */
LEANFLEET_EXPORT int leanfleet_torch_register(const char* domain, const char* key, const char* form, const char* op,
                                              const char* mutating, const char* fallback);

/* The code of this thread's last refused call, as in leanfleet.h; 0 once it was asked for. PyTorch knows RuntimeError alone. */
LEANFLEET_EXPORT int leanfleet_torch_error(void);

/* Whether the thread's last error was a refusal, before anything was written, so that the call may be made again. */
LEANFLEET_EXPORT int leanfleet_torch_refused(void);

#ifdef __cplusplus
}
#endif

#endif /* LEANFLEET_TORCH_ADAPTER_H_ */
