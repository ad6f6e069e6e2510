/* Averaging on a CPU in one pass over the weights; `kernels.py` calls it.

   A matrix has `size` rows of `width` columns; the first numbers of two rows are `stride` numbers apart. A chunk of
   columns of all rows stays in cache while it is read and written. Numbers are computed in float32, in an order that
   depends neither on the processor nor on the number of threads, and products and sums are rounded one by one
   (compile with -ffp-contract=off): results have the same bits everywhere. */

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 512 /* columns; of some numbers of rows fewer, see `chunk_of` */
#define LANES 32  /* partial sums, added up side by side */
#define LINE 64   /* bytes of a line of cache */
#define PUSH_BLOCK (64 * CHUNK)
#define MAX_THREADS 64
#define INLINE static inline __attribute__((always_inline))

/* The best code for each kind of processor, chosen when the library is loaded. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || (defined(__clang__) && __clang_major__ < 14)
#define FOR_EVERY_PROCESSOR
#elif defined(__clang__) || __GNUC__ < 12
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

#ifndef PAPA_SOURCE
#define PAPA_SOURCE 0
#endif
/* The checksum of this file, which must be that of the file beside the library. */
uint32_t papa_source(void) { return PAPA_SOURCE; }

typedef struct {
    void *rows;
    int64_t stride, size, width, is_bfloat16;
    int64_t block;        /* the number of columns for which there is a result of each row */
    double *results;      /* of a measure, block after block */
    float rest;           /* of a push: the share that a member does not keep of itself */
    const float *weights; /* what is taken of each member; 0 if that is the same number, `equal` */
    float equal;
} Job;

INLINE float get(const void *rows, int64_t index, int is_bfloat16) {
    if (!is_bfloat16) return ((const float *)rows)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)rows)[index] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE void set(void *rows, int64_t index, float number, int is_bfloat16) {
    if (!is_bfloat16) {
        ((float *)rows)[index] = number;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to the nearest, ties to even */
    ((uint16_t *)rows)[index] = (uint16_t)(number != number ? 0x7fc0 : rounded);
}

/* The best of what was tried: smaller chunks are faster for some rows, not for few or for many. */
INLINE int64_t chunk_of(const Job *job, int is_bfloat16) {
    return job->size < 5 || job->size > 16 || is_bfloat16 ? CHUNK : CHUNK / 4;
}

/* Set `sums` to the weighted sum of the rows in `count` columns from `first`; rows of weight 0 are not read. The next
   columns are requested meanwhile: processors do not foresee them in several rows at once. */
INLINE void combine(const Job *job, int64_t first, int64_t count, float *sums, int is_bfloat16) {
    int is_empty = 1;
    for (int64_t row = 0; row < job->size; row++) {
        int64_t start = row * job->stride + first;
        float weight = job->weights ? job->weights[row] : job->equal;
        if (weight == 0) continue;
        const char *next = (const char *)job->rows + (start + CHUNK) * (is_bfloat16 ? 2 : 4);
        for (int64_t k = 0; k < count * (is_bfloat16 ? 2 : 4); k += LINE) __builtin_prefetch(next + k);
        if (is_empty)
            for (int64_t k = 0; k < count; k++) sums[k] = get(job->rows, start + k, is_bfloat16) * weight;
        else
            for (int64_t k = 0; k < count; k++) sums[k] += get(job->rows, start + k, is_bfloat16) * weight;
        is_empty = 0;
    }
    if (is_empty) memset(sums, 0, count * sizeof *sums);
}

/* Add up a row's numbers, or their squared differences to the means if there are any. */
INLINE double sum_of(const Job *job, int64_t row, int64_t first, int64_t count, const float *means, int is_bfloat16) {
    float lanes[LANES] = {0};
    int64_t start = row * job->stride + first, k = 0;
    for (; k + LANES <= count; k += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) {
            float number = get(job->rows, start + k + lane, is_bfloat16);
            if (means) number -= means[k + lane];
            lanes[lane] += means ? number * number : number;
        }
    for (int64_t lane = 0; k + lane < count; lane++) {
        float number = get(job->rows, start + k + lane, is_bfloat16);
        if (means) number -= means[k + lane];
        lanes[lane] += means ? number * number : number;
    }
    for (int step = LANES / 2; step; step /= 2)
        for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
    return lanes[0];
}

INLINE void sums_block(const Job *job, int64_t first, int64_t last, int is_bfloat16) {
    double *results = job->results + first / job->block * job->size;
    for (int64_t row = 0; row < job->size; row++) results[row] = sum_of(job, row, first, last - first, 0, is_bfloat16);
}

INLINE void distances_block(const Job *job, int64_t first, int64_t last, int is_bfloat16) {
    float means[CHUNK];
    double *results = job->results + first / job->block * job->size;
    int64_t chunk = chunk_of(job, is_bfloat16);
    for (int64_t row = 0; row < job->size; row++) results[row] = 0;
    for (; first < last; first += chunk) {
        int64_t count = last - first < chunk ? last - first : chunk;
        combine(job, first, count, means, is_bfloat16);
        for (int64_t row = 0; row < job->size; row++) results[row] += sum_of(job, row, first, count, means, is_bfloat16);
    }
}

/* Written as small differences, so that members that are equal stay so. */
INLINE void push_block(const Job *job, int64_t first, int64_t last, int is_bfloat16) {
    float sums[CHUNK], rest = job->rest;
    int64_t chunk = chunk_of(job, is_bfloat16);
    for (; first < last; first += chunk) {
        int64_t count = last - first < chunk ? last - first : chunk;
        combine(job, first, count, sums, is_bfloat16);
        for (int64_t row = 0; row < job->size; row++) {
            int64_t start = row * job->stride + first;
            if (rest == 1)
                for (int64_t k = 0; k < count; k++) set(job->rows, start + k, sums[k], is_bfloat16);
            else
                for (int64_t k = 0; k < count; k++) {
                    float number = get(job->rows, start + k, is_bfloat16);
                    set(job->rows, start + k, number + (sums[k] - number * rest), is_bfloat16);
                }
        }
    }
}

/* What is done with a block of columns. */
typedef void Work(const Job *job, int64_t first, int64_t last);

#define DEFINE_WORK(name)                                                              \
    FOR_EVERY_PROCESSOR static void name(const Job *job, int64_t first, int64_t last) { \
        if (job->is_bfloat16) name##_block(job, first, last, 1);                       \
        else name##_block(job, first, last, 0);                                        \
    }
DEFINE_WORK(push)
DEFINE_WORK(distances)
DEFINE_WORK(sums)

typedef struct {
    Work *work;
    const Job *job;
    int64_t first, last; /* blocks */
} Part;

/* The last columns first: if others were read just before, the last may still be in cache. */
static void *run_part(void *argument) {
    const Part *part = argument;
    const Job *job = part->job;
    for (int64_t block = part->last - 1; block >= part->first; block--) {
        int64_t last = (block + 1) * job->block;
        part->work(job, block * job->block, last < job->width ? last : job->width);
    }
    return 0;
}

/* Split the blocks among threads. What a thread that cannot be started should do is done here. */
static void run(const Job *job, Work *work, int64_t num_threads) {
    Part parts[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    int is_running[MAX_THREADS];
    int64_t num_blocks = (job->width + job->block - 1) / job->block;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads > num_blocks) num_threads = num_blocks;
    for (int64_t i = num_threads - 1; i >= 0; i--) {
        parts[i] = (Part){work, job, num_blocks * i / num_threads, num_blocks * (i + 1) / num_threads};
        is_running[i] = i && !pthread_create(&threads[i], 0, run_part, &parts[i]);
        if (!is_running[i]) run_part(&parts[i]);
    }
    for (int64_t i = 1; i < num_threads; i++)
        if (is_running[i]) pthread_join(threads[i], 0);
}

/* rows <- (1 - rest) * rows + the weighted sum of all rows; without weights, these are equal and sum to `rest`. */
void papa_push(void *rows, int64_t stride, int64_t size, int64_t width, int64_t is_bfloat16, int64_t num_threads,
               float rest, const float *weights) {
    Job job = {rows, stride, size, width, is_bfloat16, PUSH_BLOCK, 0, rest, weights, rest / (float)size};
    run(&job, push, num_threads);
}

/* results[block][row] = the squared distance of each row to the mean of all, in the columns of each block. */
void papa_squared_distances(void *rows, int64_t stride, int64_t size, int64_t width, int64_t is_bfloat16,
                            int64_t num_threads, int64_t block, double *results) {
    Job job = {rows, stride, size, width, is_bfloat16, block, results, 0, 0, 1 / (float)size};
    run(&job, distances, num_threads);
}

/* results[block][row] = the sum of the numbers of each row, in the columns of each block. */
void papa_sums(void *rows, int64_t stride, int64_t size, int64_t width, int64_t is_bfloat16, int64_t num_threads,
               int64_t block, double *results) {
    Job job = {rows, stride, size, width, is_bfloat16, block, results, 0, 0, 0};
    run(&job, sums, num_threads);
}
