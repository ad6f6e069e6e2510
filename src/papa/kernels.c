/* Averaging on a CPU in one pass over the weights; `kernels.py` calls it.

   A matrix has `size` rows of `width` columns, the first numbers of two rows are `stride` apart. A chunk of columns
   of all rows stays in the nearest cache while it is read and written. Numbers are computed in float32, in an order
   that depends neither on the processor nor on the number of threads, and products and sums are rounded one by one
   (compile with -ffp-contract=off): results have the same bits everywhere. */

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 512 /* columns; of many rows fewer, see `chunk_of` */
#define LANES 32  /* partial sums, added up side by side */
#define LINE 64   /* bytes of a line of cache */
#define PUSH_BLOCK (64 * CHUNK)
#define MAX_THREADS 64

/* The best code for each kind of processor, chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    void *rows;
    int64_t stride, size, width;
    int64_t is_bfloat16;
    float own;            /* of a push: the share that a member keeps */
    const float *weights; /* of a push: what it takes of each member; 0 if that is the same number, `equal` */
    float equal;
    int64_t block;        /* of a measure: the number of columns for which there is a result of each row */
    double *results;
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
INLINE int64_t chunk_of(const Job *job, int half) {
    return job->size < 5 || job->size > 16 || half ? CHUNK : CHUNK / 4;
}

/* shared = the weighted sum of the rows in `count` columns from `first`; rows of weight 0 are not read. The next columns are requested meanwhile: processors do not foresee them in several rows at once. */
INLINE void add_up(const Job *job, int64_t first, int64_t count, float *shared, int half) {
    memset(shared, 0, count * sizeof *shared);
    for (int64_t row = 0; row < job->size; row++) {
        int64_t start = row * job->stride + first;
        float weight = job->weights ? job->weights[row] : job->equal;
        if (weight == 0.0f) continue;
        const char *next = (const char *)job->rows + (start + CHUNK) * (half ? 2 : 4);
        for (int64_t k = 0; k < count * (half ? 2 : 4); k += LINE) __builtin_prefetch(next + k);
        for (int64_t k = 0; k < count; k++) shared[k] += get(job->rows, start + k, half) * weight;
    }
}

/* Every row keeps the share `own` of itself, and takes the rest from the weighted sum of all.
   Written as a small difference, so that members that are equal stay so to the bit. */
INLINE void push_columns(const Job *job, int64_t first, int64_t last, int half) {
    float shared[CHUNK], own = job->own, rest = 1.0f - own;
    int64_t chunk = chunk_of(job, half);
    for (; first < last; first += chunk) {
        int64_t count = last - first < chunk ? last - first : chunk;
        add_up(job, first, count, shared, half);
        for (int64_t row = 0; row < job->size; row++) {
            int64_t start = row * job->stride + first;
            if (own == 0.0f)
                for (int64_t k = 0; k < count; k++) set(job->rows, start + k, shared[k], half);
            else
                for (int64_t k = 0; k < count; k++) {
                    float number = get(job->rows, start + k, half);
                    set(job->rows, start + k, number + (shared[k] - number * rest), half);
                }
        }
    }
}

/* The last columns first: a check has just read all of them, and the last may still be in cache. */
INLINE void push_blocks(const Job *job, int64_t first, int64_t last, int half) {
    while (first < last) {
        int64_t start = (last - 1) / job->block * job->block;
        push_columns(job, start, last, half);
        last = start;
    }
}

/* Add the sum of numbers, or of squared differences, to a result. */
INLINE void reduce(const Job *job, int64_t row, int64_t first, int64_t count, const float *mean, double *result, int half) {
    float lanes[LANES] = {0};
    int64_t start = row * job->stride + first, k = 0;
    for (; k + LANES <= count; k += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) {
            float number = get(job->rows, start + k + lane, half);
            float difference = mean ? number - mean[k + lane] : number;
            lanes[lane] += mean ? difference * difference : number;
        }
    for (int64_t lane = 0; k + lane < count; lane++) {
        float number = get(job->rows, start + k + lane, half);
        float difference = mean ? number - mean[k + lane] : number;
        lanes[lane] += mean ? difference * difference : number;
    }
    for (int half_of = LANES / 2; half_of; half_of /= 2)
        for (int lane = 0; lane < half_of; lane++) lanes[lane] += lanes[lane + half_of];
    *result += lanes[0];
}

INLINE void measure_columns(const Job *job, int64_t first, int64_t last, int has_mean, int half) {
    float mean[CHUNK];
    int64_t chunk = chunk_of(job, half);
    while (first < last) {
        double *results = job->results + first / job->block * job->size;
        int64_t end = (first / job->block + 1) * job->block;
        end = end < last ? end : last;
        memset(results, 0, job->size * sizeof *results);
        if (!has_mean)
            for (int64_t row = 0; row < job->size; row++) reduce(job, row, first, end - first, 0, results + row, half);
        for (; has_mean && first < end; first += chunk) {
            int64_t count = end - first < chunk ? end - first : chunk;
            add_up(job, first, count, mean, half);
            for (int64_t row = 0; row < job->size; row++) reduce(job, row, first, count, mean, results + row, half);
        }
        first = end;
    }
}

typedef void Work(const Job *job, int64_t first, int64_t last);

FOR_EVERY_PROCESSOR static void push_work(const Job *job, int64_t first, int64_t last) {
    if (job->is_bfloat16) push_blocks(job, first, last, 1);
    else push_blocks(job, first, last, 0);
}

FOR_EVERY_PROCESSOR static void distances_work(const Job *job, int64_t first, int64_t last) {
    if (job->is_bfloat16) measure_columns(job, first, last, 1, 1);
    else measure_columns(job, first, last, 1, 0);
}

FOR_EVERY_PROCESSOR static void sums_work(const Job *job, int64_t first, int64_t last) {
    if (job->is_bfloat16) measure_columns(job, first, last, 0, 1);
    else measure_columns(job, first, last, 0, 0);
}

typedef struct {
    Work *work;
    const Job *job;
    int64_t first, last;
} Part;

static void *run_part(void *argument) {
    const Part *part = argument;
    part->work(part->job, part->first, part->last);
    return 0;
}

/* Split whole blocks of columns among threads. A thread that cannot be started is done here. */
static void run(const Job *job, Work *work, int64_t num_threads) {
    Part parts[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    int is_running[MAX_THREADS];
    int64_t num_blocks = (job->width + job->block - 1) / job->block;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads > num_blocks) num_threads = num_blocks;
    for (int64_t i = num_threads - 1; i >= 0; i--) {
        int64_t last = num_blocks * (i + 1) / num_threads * job->block;
        parts[i] = (Part){work, job, num_blocks * i / num_threads * job->block, last < job->width ? last : job->width};
        is_running[i] = i && !pthread_create(&threads[i], 0, run_part, &parts[i]);
        if (!is_running[i]) run_part(&parts[i]);
    }
    for (int64_t i = 1; i < num_threads; i++)
        if (is_running[i]) pthread_join(threads[i], 0);
}

/* rows <- own * rows + the weighted sum of all rows, where `own` and the weights sum to 1. Without weights, all of them
   are `equal`. */
void papa_push(void *rows, int64_t stride, int64_t size, int64_t width, int64_t is_bfloat16, int64_t num_threads,
               float own, float equal, const float *weights) {
    Job job = {rows, stride, size, width, is_bfloat16, own, weights, equal, PUSH_BLOCK, 0};
    run(&job, push_work, num_threads);
}

/* results[block][row] = the squared distance of each row to the mean of all, in the columns of each block. */
void papa_squared_distances(void *rows, int64_t stride, int64_t size, int64_t width, int64_t is_bfloat16,
                            int64_t num_threads, int64_t block, double *results) {
    Job job = {rows, stride, size, width, is_bfloat16, 0, 0, 1.0f / (float)size, block, results};
    run(&job, distances_work, num_threads);
}

/* results[block][row] = the sum of the numbers of each row, in the columns of each block. */
void papa_sums(void *rows, int64_t stride, int64_t size, int64_t width, int64_t is_bfloat16, int64_t num_threads,
               int64_t block, double *results) {
    Job job = {rows, stride, size, width, is_bfloat16, 0, 0, 0, block, results};
    run(&job, sums_work, num_threads);
}
