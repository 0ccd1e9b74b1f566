/* The C interface of libleanfleet.so. What is said of communicators, and leanfleet_last_error, the libraries for ONNX Runtime
 * and TensorRT export too. It does not grow with operators: they are called by name, with tensors in the
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

/* All return 0, or a code (1 invalid argument, 2 unsupported, 3 CUDA, 4 internal, 5 another rank) with leanfleet_last_error set. */

/* Checks the call without running it and sizes its workspace. Data pointers and outputs are not looked at. */
LEANFLEET_EXPORT int leanfleet_workspace(const leanfleet_call* call, size_t* scratch_bytes, size_t* sync_bytes);

/* Runs it. Nothing is written when an argument is refused. */
LEANFLEET_EXPORT int leanfleet_run(const leanfleet_call* call);

/* ---- Communicators: groups of processes whose nodes exchange tensors, by name. Each library of a process has a registry. */

enum { LEANFLEET_SHARED_MEMORY = 0, LEANFLEET_NCCL = 1 }; /* engines: for tensors of the CPU, for those of CUDA */

typedef struct {
  const char* name; /* what nodes give as their attribute */
  int32_t rank, world;
  int32_t engine;
  int32_t device; /* NCCL: the CUDA device; -1: the current one */
  const void* id; /* the same bytes on all ranks, of this communicator alone: leanfleet_nccl_id, or any for shared memory */
  size_t id_bytes;
  const char* library; /* NCCL: what dlopen gets; NULL: libnccl.so.2 */
  double timeout_s;    /* how long a rank waits for the others */
} leanfleet_communicator;

/* Waits for the other ranks. A world of one needs no id and serves both devices. */
LEANFLEET_EXPORT int leanfleet_communicator_create(const leanfleet_communicator* communicator);
LEANFLEET_EXPORT int leanfleet_communicator_destroy(const char* name);
/* 0, or what is known of its failure, without waiting. Where rank and world are not NULL they are set. */
LEANFLEET_EXPORT int leanfleet_communicator_check(const char* name, int32_t engine, int32_t* rank, int32_t* world);
/* How many of its exchanges went through the memory of the other GPUs, without NCCL. */
LEANFLEET_EXPORT int leanfleet_communicator_direct(const char* name, int32_t engine, int64_t* exchanges);
/* Makes its calls, those that wait on a stream too, fail with the reason. */
LEANFLEET_EXPORT int leanfleet_communicator_abort(const char* name, int32_t engine, const char* reason);
/* A fresh id, 128 bytes. */
LEANFLEET_EXPORT int leanfleet_nccl_id(const char* library, void* id);

/* A communicator of one library, for another of the same process. Functions return a code and write a text for it. */
typedef struct {
  void* self;
  int32_t rank, world, engine;
  int (*sum)(void* self, const void* input, void* output, int64_t count, int32_t dtype, void* stream, char* error,
             size_t error_bytes);
  int (*gather)(void* self, const void* input, void* output, int64_t count, int32_t dtype, void* stream, char* error,
                size_t error_bytes);
  /* Merges in place; *done 0: it does not, who calls gathers. part: a PartialAttention of core/communicator.h, of the same
     release. */
  int (*merge)(void* self, const void* part, void* stream, int32_t* done, char* error, size_t error_bytes);
  void (*release)(void* self);
} leanfleet_lent;

/* Who takes it calls release, as leanfleet_communicator_destroy does after leanfleet_communicator_adopt. */
LEANFLEET_EXPORT int leanfleet_communicator_lend(const char* name, int32_t engine, leanfleet_lent* lent);
LEANFLEET_EXPORT int leanfleet_communicator_adopt(const char* name, const leanfleet_lent* lent);

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
