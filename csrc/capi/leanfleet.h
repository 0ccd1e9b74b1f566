/* The C interface of libleanfleet.so. It does not grow with operators: they are called by name, with tensors in the
 * order of ops.toml and attributes by name. */
#ifndef LEANFLEET_H_
#define LEANFLEET_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LEANFLEET_EXPORT __attribute__((visibility("default")))

#define LEANFLEET_MAX_RANK 8

/* dtype: 0 float32, 1 float16, 2 bfloat16, 3 int32, 4 int64, 5 int8, 6 float8e4m3fn, 7 uint8. rank -1: absent. Contiguous, row-major. */
typedef struct {
  void* data;
  int64_t shape[LEANFLEET_MAX_RANK];
  int32_t dtype;
  int32_t rank;
} leanfleet_tensor;

/* kind: 0 integer (and bool), 1 float, 2 string; attributes not given take their default. */
typedef struct {
  const char* name;
  const char* s;
  int64_t i;
  float f;
  int32_t kind;
} leanfleet_attr;

typedef struct {
  const char* op;   /* "LeanAttention" */
  const char* node; /* for messages, may be NULL */
  const leanfleet_tensor* inputs;
  const leanfleet_tensor* outputs;
  const leanfleet_attr* attrs;
  int32_t num_inputs, num_outputs, num_attrs;
  int32_t device;  /* 0 CPU, 1 the current CUDA device */
  int32_t threads; /* CPU: threads to use, 0: all that the process may use */
  void* stream;    /* CUDA: cudaStream_t */
  void* scratch;   /* 256-byte aligned, any content */
  void* sync;      /* 256-byte aligned; zero before the first call, left zero by each; one per stream */
  size_t scratch_bytes, sync_bytes;
} leanfleet_call;

/* All return 0, or a code (1 invalid argument, 2 unsupported, 3 CUDA, 4 internal) with leanfleet_last_error set. */

/* Checks the call without running it and sizes its workspace. Data pointers and outputs are not looked at. */
LEANFLEET_EXPORT int leanfleet_workspace(const leanfleet_call* call, size_t* scratch_bytes, size_t* sync_bytes);

/* Runs it. Nothing is written when an argument is refused. */
LEANFLEET_EXPORT int leanfleet_run(const leanfleet_call* call);

/* The text of this thread's last error. */
LEANFLEET_EXPORT const char* leanfleet_last_error(void);

/* Name of operator `index`, NULL past the last. */
LEANFLEET_EXPORT const char* leanfleet_op_name(int index);

/* "cpu avx512" or "cpu avx512, cuda": the kernels that this library holds for this processor. */
LEANFLEET_EXPORT const char* leanfleet_build_info(void);

#ifdef __cplusplus
}
#endif

#endif /* LEANFLEET_H_ */
