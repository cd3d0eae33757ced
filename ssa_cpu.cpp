// SSA attention on CPU, forward and backward: the kernel behind the path `blockwise` where a C++ compiler is present.
//
// ssa_cpu.py compiles this file on first use and calls `ssa_forward` and `ssa_backward`. It is plain C++ and OpenMP:
// all arrays, scratch memory included, belong to the caller, and the matrix products are those of PyTorch's BLAS.
//
// One (batch, head) at a time, in tiles of ROWS queries by COLS keys that stay in the core's cache:
//
//     z = scale q k^T                                     BLAS
//     t = sgn(z) n log2(1 + b|z|),   p = 2^t              one vectorised loop, no call to the maths library
//     out = sum p v / sum p,   lse = log(sum p)           BLAS, and one division a row
//
// and backwards, with P = 2^(t - lse / log 2), dP = dout v^T and delta = rowsum(dout * out) = rowsum(P dP):
//
//     dt = P (dP - delta),   dz = dt n b / (1 + b|z|),   dn = sum dt t / n,   db = sum dz z / b
//     dv = P^T dout,   dq = scale dz k,   dk = scale dz^T q
//
// Why there is no running maximum. By Cauchy-Schwarz |z| <= scale |q| |k|, so with the longest q of a tile and the
// longest k of the head, |t| <= n log2(1 + b scale max|q| max|k|). While that is at most 60, 2^-60 <= p <= 2^60: no p
// overflows or fades to 0, nor does a sum of fewer than 2^60 of them. Growth is polynomial, so every head met in
// training is far below: b = 1, n = 2 allow |z| up to a billion. (Softmax's t is z itself, and exp(z) overflows at 89.)
// Where a tile is not `tame`, the functions below return 0 and ssa_flash.py takes the pure PyTorch version instead.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

extern "C" void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);
extern "C" void gemm_bf16bf16f32_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                                  const float* alpha, const uint16_t* a, const int* lda, const uint16_t* b,
                                  const int* ldb, const float* beta, float* c, const int* ldc)
    __attribute__((weak));  // MKL has it; null elsewhere

namespace {

constexpr int64_t ROWS = 64, COLS = 256;  // z and dP of a tile: 64 KB each, beside 256 rows of k, v, dk and dv in L2

// A tensor (B, H, T, width): the strides count elements, the last one is 1.
struct Tensor4 {
    void* data;
    int64_t batch, head, row;
};

struct Problem {  // ssa_cpu.py fills it in, in this order
    int64_t B, H, Hkv, Q, K, D, Dv;
    int64_t bfloat16, bfloat16_products, causal, threads, scratch_size;
    const float *b, *n;    // (H,)
    float* lse;            // (B, H, Q)
    double* sums;          // (2, B, H): what b's and n's gradients sum up to
    const uint8_t* mask;   // null, or (B, H, Q, K) through these strides, 0 where a dimension is broadcast
    float* scratch;        // `threads` times scratch_size floats
    int64_t mask_batch, mask_head, mask_row, mask_col;
    Tensor4 q, k, v, out, dout, dq, dk, dv;
    double scale;
};

// ----------------------------------------------------------------------------------------------------- the elementwise

inline int32_t bits_of(float x) { int32_t i; std::memcpy(&i, &x, 4); return i; }
inline float float_of(int32_t i) { float x; std::memcpy(&x, &i, 4); return x; }

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return float_of(static_cast<int32_t>(x) << 16); }  // bfloat16: float32's upper half

inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, uint16_t& to) {
    const uint32_t i = bits_of(x);
    to = x != x ? 0x7fc0 : (i + 0x7fff + ((i >> 16) & 1)) >> 16;  // nearest, ties to even
}

// log2(1 + x), 0 <= x < 2^127, relative error below 2e-7: 1 + x = 2^e (1 + f), -1/4 <= f < 1/2.
inline float log2_1p(float x) {
    const float u = 1.0f + x;
    const int32_t e = (bits_of(u) - 0x3f400000) >> 23;  // 0x3f400000 is 0.75, where e steps up
    const float f = e == 0 ? x : float_of(bits_of(u) - (e << 23)) - 1.0f;  // x itself keeps the digits that 1 + x drops
    float p = 0.0780657232f;  // log2(1 + f) / f: least maximal relative error among polynomials of degree 8
    p = (p * f - 0.174229220f) * f + 0.216324717f;
    p = (p * f - 0.242723629f) * f + 0.288191527f;
    p = (p * f - 0.360575914f) * f + 0.480902076f;
    p = (p * f - 0.721348464f) * f + 1.44269502f;
    return p * f + static_cast<float>(e);
}

// 2^t, -126 <= t <= 127, relative error below 3e-7: 2^t = 2^i 2^f, i the nearest integer, -1/2 <= f <= 1/2.
inline float exp2_poly(float t) {
    const float shifted = t + 12582912.0f;  // 1.5 * 2^23: rounds t to an integer and leaves that in the lowest bits
    const float f = t - (shifted - 12582912.0f);
    float p = 0.00132764666f;  // 2^f: least maximal relative error among polynomials of degree 5
    p = (p * f + 0.00967554096f) * f + 0.0555071346f;
    p = (p * f + 0.240221202f) * f + 0.693146944f;
    p = p * f + 1.00000012f;
    return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

// A row of scores z -> its unnormalised weights p; returns their sum. allowed: null, or a mask's row, 1 or 0. (Floats, and not the
// mask's bytes: in a loop over both, one vector holds 32 keys, and the rest of a short row is computed key by key.)
// M, here and below, is what enters a matrix product: float, or uint16_t for bfloat16. With float, p may be z itself.
template <bool masked, typename M>
float weigh(const float* z, M* p, int64_t count, float b, float n, const float* allowed) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; j++) {
        const float t = std::copysign(n * log2_1p(b * std::fabs(z[j])), z[j]);
        const float e = exp2_poly(t);
        const float pj = masked ? e * allowed[j] : e;
        narrow(pj, p[j]);
        sum += pj;
    }
    return sum;
}

// A row of z and of dP -> a row of P and of dz; the row's share of dn / log 2 and of b db is added on.
template <bool masked, typename M>
void weigh_backward(const float* z, const float* dp, M* p, M* dz, int64_t count, float b, float n, float lse,
                    float delta, const float* allowed, double& dn, double& db) {
    const float nb = n * b;
    float sum_n = 0.0f, sum_b = 0.0f;
#pragma omp simd reduction(+ : sum_n, sum_b)
    for (int64_t j = 0; j < count; j++) {
        const float zj = z[j], x = b * std::fabs(zj);
        const float log = std::copysign(log2_1p(x), zj);
        const float t = n * log - lse;
        const float e = exp2_poly(t > -126.0f ? t : -126.0f);
        const float pj = masked ? e * allowed[j] : e;
        const float dt = pj * (dp[j] - delta);
        const float dzj = dt * (nb / (1.0f + x));
        narrow(pj, p[j]);
        narrow(dzj, dz[j]);
        sum_n += dt * log;
        sum_b += dzj * zj;
    }
    dn += sum_n;
    db += sum_b;
}

// --------------------------------------------------------------------------------------------- rows in, rows out, BLAS

template <typename From, typename To>
void copy_row(const From* from, float scale, int64_t width, To* to) {
    for (int64_t j = 0; j < width; j++) narrow(scale * widen(from[j]), to[j]);
}

// `count` rows from `first` on of x[batch, head], times `scale` -> out (count, width), contiguous.
template <typename M>
void load(const Problem& p, const Tensor4& x, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t width,
          float scale, M* out) {
    int64_t at = batch * x.batch + head * x.head + first * x.row;
    for (int64_t i = 0; i < count; i++, at += x.row, out += width) {
        if (p.bfloat16) copy_row(static_cast<const uint16_t*>(x.data) + at, scale, width, out);
        else copy_row(static_cast<const float*>(x.data) + at, scale, width, out);
    }
}

// The reverse: `count` contiguous rows, times `scale` -> x[batch, head] from row `first` on.
void store(const Problem& p, const Tensor4& x, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t width,
           float scale, const float* in) {
    int64_t at = batch * x.batch + head * x.head + first * x.row;
    for (int64_t i = 0; i < count; i++, at += x.row, in += width) {
        if (p.bfloat16) copy_row(in, scale, width, static_cast<uint16_t*>(x.data) + at);
        else copy_row(in, scale, width, static_cast<float*>(x.data) + at);
    }
}

inline void gemm(char op_a, char op_b, int m, int n, int k, const float* a, int lda, const float* b, int ldb,
                 float beta, float* c, int ldc) {
    const float one = 1;
    sgemm_(&op_a, &op_b, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
}
inline void gemm(char op_a, char op_b, int m, int n, int k, const uint16_t* a, int lda, const uint16_t* b, int ldb,
                 float beta, float* c, int ldc) {
    const float one = 1.0f;
    gemm_bf16bf16f32_(&op_a, &op_b, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
}

// c (m, n) = beta c + op(a) op(b), all row-major with leading dimensions ld; op transposes where the flag is 'T'.
// BLAS counts by columns, and a row-major matrix is the transpose of a column-major one: c^T = op(b)^T op(a)^T.
template <typename M>
void matmul(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const M* a, int64_t lda, const M* b, int64_t ldb,
            float beta, float* c, int64_t ldc) {
    gemm(op_b, op_a, n, m, k, b, ldb, a, lda, beta, c, ldc);
}

template <typename M>
float longest(const M* rows, int64_t count, int64_t width) {
    float most = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < width; j++) square += widen(rows[i * width + j]) * widen(rows[i * width + j]);
        most = square <= most ? most : square;  // in this order, because a NaN must not be passed over
    }
    return std::sqrt(most);
}
inline bool tame(float b, float n, float longest_q, float longest_k) {
    return n * std::log2(1.0f + b * longest_q * longest_k) <= 60.0f;  // false for inf and NaN
}

// How many of `cols` keys from key `j0` on query `i` may see: with causal, the last query sees the last key.
inline int64_t visible(const Problem& p, int64_t i, int64_t j0, int64_t cols) {
    if (!p.causal) return cols;
    const int64_t count = p.K - p.Q + i + 1 - j0;
    return std::clamp<int64_t>(count, 0, cols);
}

// The mask of query i from key j0 on, 1 or 0, in buffer, which has room for COLS; or null where there is none.
const float* mask_row(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t j0, int64_t count, float* buffer) {
    if (!p.mask) return nullptr;
    const uint8_t* row = p.mask + batch * p.mask_batch + head * p.mask_head + i * p.mask_row + j0 * p.mask_col;
    if (p.mask_col == 1) for (int64_t j = 0; j < count; j++) buffer[j] = row[j];
    else for (int64_t j = 0; j < count; j++) buffer[j] = row[j * p.mask_col];
    return buffer;
}

// ----------------------------------------------------------------------------------------------------- one head's work

// Cuts a piece off the scratch memory.
template <typename T>
T* take(float*& scratch, int64_t count) {
    float* start = scratch;
    scratch += (count * sizeof(T) + sizeof(float) - 1) / sizeof(float);
    return reinterpret_cast<T*>(start);
}

// Weights as wide as the scores they come from take their place.
template <typename M>
M* weights_of(float* scores, float*& scratch) {
    return std::is_same_v<M, float> ? reinterpret_cast<M*>(scores) : take<M>(scratch, ROWS * COLS);
}

// One query head. Returns whether all was tame, as does the next.
template <typename M>
bool forward_head(const Problem& p, int64_t batch, int64_t head, float* scratch) {
    const int64_t kv_head = head / (p.H / p.Hkv), D = p.D, Dv = p.Dv;
    M *k = take<M>(scratch, p.K * D), *v = take<M>(scratch, p.K * Dv), *q = take<M>(scratch, ROWS * D);
    float *z = take<float>(scratch, ROWS * COLS), *out = take<float>(scratch, ROWS * Dv);
    M* weights = weights_of<M>(z, scratch);
    load(p, p.k, batch, kv_head, 0, p.K, D, 1.0f, k);
    load(p, p.v, batch, kv_head, 0, p.K, Dv, 1.0f, v);
    const float b = p.b[head], n = p.n[head], longest_k = longest(k, p.K, D);
    float* lse = p.lse + (batch * p.H + head) * p.Q;
    float buffer[COLS];

    for (int64_t i0 = 0; i0 < p.Q; i0 += ROWS) {
        const int64_t rows = std::min(ROWS, p.Q - i0);
        load(p, p.q, batch, head, i0, rows, D, static_cast<float>(p.scale), q);
        if (!tame(b, n, longest(q, rows, D), longest_k)) return false;
        std::memset(out, 0, rows * Dv * sizeof(float));
        double sum[ROWS] = {0};
        const int64_t end = visible(p, i0 + rows - 1, 0, p.K);  // the last query of the tile sees the most keys
        for (int64_t j0 = 0; j0 < end; j0 += COLS) {
            const int64_t cols = std::min(COLS, end - j0);
            matmul('N', 'T', rows, cols, D, q, D, k + j0 * D, D, 0.0f, z, COLS);
            for (int64_t r = 0; r < rows; r++) {
                M* row = weights + r * COLS;
                const int64_t count = visible(p, i0 + r, j0, cols);
                const float* allowed = mask_row(p, batch, head, i0 + r, j0, count, buffer);
                sum[r] += allowed ? weigh<true>(z + r * COLS, row, count, b, n, allowed)
                                  : weigh<false>(z + r * COLS, row, count, b, n, nullptr);
                std::memset(row + count, 0, (cols - count) * sizeof(M));
            }
            matmul('N', 'N', rows, Dv, cols, weights, COLS, v + j0 * Dv, Dv, 1.0f, out, Dv);
        }
        for (int64_t r = 0; r < rows; r++) {
            const float inverse = sum[r] > 0 ? 1.0 / sum[r] : 0.0f;  // a row that sees nothing is all 0
            for (int64_t d = 0; d < Dv; d++) out[r * Dv + d] *= inverse;
            lse[i0 + r] = sum[r] > 0 ? std::log(sum[r]) : 0.0f;  // base e, as in the other kernels
        }
        store(p, p.out, batch, head, i0, rows, Dv, 1.0f, out);
    }
    return true;
}

// All query heads that share one key/value head, so that nobody else adds to its dk and dv.
template <typename M>
bool backward_head(const Problem& p, int64_t batch, int64_t kv_head, float* scratch) {
    const int64_t groups = p.H / p.Hkv, D = p.D, Dv = p.Dv;
    M *k = take<M>(scratch, p.K * D), *v = take<M>(scratch, p.K * Dv), *q = take<M>(scratch, ROWS * D);
    M *out = take<M>(scratch, ROWS * Dv), *dout = take<M>(scratch, ROWS * Dv);
    float *z = take<float>(scratch, ROWS * COLS), *dp = take<float>(scratch, ROWS * COLS);
    M *weights = weights_of<M>(z, scratch), *dz = weights_of<M>(dp, scratch);
    float *dq = take<float>(scratch, ROWS * D), *dk = take<float>(scratch, p.K * D);
    float* dv = take<float>(scratch, p.K * Dv);
    load(p, p.k, batch, kv_head, 0, p.K, D, 1.0f, k);
    load(p, p.v, batch, kv_head, 0, p.K, Dv, 1.0f, v);
    std::memset(dk, 0, p.K * D * sizeof(float));
    std::memset(dv, 0, p.K * Dv * sizeof(float));
    const float longest_k = longest(k, p.K, D);
    float buffer[COLS];

    for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; head++) {
        const float b = p.b[head], n = p.n[head];
        const float* lse = p.lse + (batch * p.H + head) * p.Q;
        double dn = 0.0, db = 0.0;
        for (int64_t i0 = 0; i0 < p.Q; i0 += ROWS) {
            const int64_t rows = std::min(ROWS, p.Q - i0);
            load(p, p.q, batch, head, i0, rows, D, static_cast<float>(p.scale), q);
            if (!tame(b, n, longest(q, rows, D), longest_k)) return false;
            load(p, p.out, batch, head, i0, rows, Dv, 1.0f, out);
            load(p, p.dout, batch, head, i0, rows, Dv, 1.0f, dout);
            float delta[ROWS] = {0};
            for (int64_t r = 0; r < rows; r++)
                for (int64_t d = 0; d < Dv; d++) delta[r] += widen(dout[r * Dv + d]) * widen(out[r * Dv + d]);
            std::memset(dq, 0, rows * D * sizeof(float));
            const int64_t end = visible(p, i0 + rows - 1, 0, p.K);
            for (int64_t j0 = 0; j0 < end; j0 += COLS) {
                const int64_t cols = std::min(COLS, end - j0);
                matmul('N', 'T', rows, cols, D, q, D, k + j0 * D, D, 0.0f, z, COLS);
                matmul('N', 'T', rows, cols, Dv, dout, Dv, v + j0 * Dv, Dv, 0.0f, dp, COLS);
                for (int64_t r = 0; r < rows; r++) {
                    M *row = weights + r * COLS, *drow = dz + r * COLS;
                    const float lse2 = lse[i0 + r] * 1.44269504f;  // in base 2
                    const int64_t count = visible(p, i0 + r, j0, cols);
                    const float* allowed = mask_row(p, batch, head, i0 + r, j0, count, buffer);
                    const auto apply = allowed ? weigh_backward<true, M> : weigh_backward<false, M>;
                    apply(z + r * COLS, dp + r * COLS, row, drow, count, b, n, lse2, delta[r], allowed, dn, db);
                    std::memset(row + count, 0, (cols - count) * sizeof(M));
                    std::memset(drow + count, 0, (cols - count) * sizeof(M));
                }
                matmul('T', 'N', cols, Dv, rows, weights, COLS, dout, Dv, 1.0f, dv + j0 * Dv, Dv);
                matmul('T', 'N', cols, D, rows, dz, COLS, q, D, 1.0f, dk + j0 * D, D);
                matmul('N', 'N', rows, D, cols, dz, COLS, k + j0 * D, D, 1.0f, dq, D);
            }
            store(p, p.dq, batch, head, i0, rows, D, static_cast<float>(p.scale), dq);
        }
        p.sums[batch * p.H + head] = db / b;
        p.sums[(p.B + batch) * p.H + head] = dn * 0.69314718055994531;  // log 2: t was counted in base 2
    }
    store(p, p.dk, batch, kv_head, 0, p.K, D, 1.0f, dk);
    store(p, p.dv, batch, kv_head, 0, p.K, Dv, 1.0f, dv);
    return true;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- what Python sees

// Floats a thread: k and v of a head (backward: and their gradients), tiles of queries, z and weights (and dP, dz).
extern "C" int64_t ssa_scratch_size(int64_t K, int64_t D, int64_t Dv, int64_t backward) {
    return (1 + backward) * (K * (D + Dv) + 2 * ROWS * (D + Dv) + 2 * ROWS * COLS) + 16;
}

// Whether a tile's product is at least a fifth faster in bfloat16 than in float32 on this CPU; both are timed.
extern "C" int ssa_bfloat16_pays() {
    if (!gemm_bf16bf16f32_) return 0;
    constexpr int64_t D = 64;
    const std::vector<float> a(ROWS * D, 1.0f), b(COLS * D, 1.0f);
    const std::vector<uint16_t> narrow_a(ROWS * D, 0x3f80), narrow_b(COLS * D, 0x3f80);
    std::vector<float> c(ROWS * COLS);
    const auto seconds = [&](const auto& a, const auto& b) {
        const auto start = std::chrono::steady_clock::now();
        matmul('N', 'T', ROWS, COLS, D, a.data(), D, b.data(), D, 0.0f, c.data(), COLS);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    double wide = 1e9, narrow = 1e9;
#pragma omp parallel num_threads(2)
#pragma omp single  // one thread of a parallel region, where BLAS starts none of its own: as in the kernels
    for (int i = 0; i < 10; i++) {
        wide = std::min(wide, seconds(a, b));
        narrow = std::min(narrow, seconds(narrow_a, narrow_b));
    }
    return narrow < 0.8 * wide;
}

// Both return 1, or 0 if some tile was not tame; what they wrote is worthless then.
extern "C" int ssa_forward(const Problem* p) {
    const auto head = p->bfloat16_products ? forward_head<uint16_t> : forward_head<float>;
    int all = 1;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(min : all)
    for (int64_t task = 0; task < p->B * p->H; task++)
        all &= head(*p, task / p->H, task % p->H, p->scratch + p->scratch_size * omp_get_thread_num());
    return all;
}

extern "C" int ssa_backward(const Problem* p) {
    const auto head = p->bfloat16_products ? backward_head<uint16_t> : backward_head<float>;
    int all = 1;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(min : all)
    for (int64_t task = 0; task < p->B * p->Hkv; task++)
        all &= head(*p, task / p->Hkv, task % p->Hkv, p->scratch + p->scratch_size * omp_get_thread_num());
    return all;
}
