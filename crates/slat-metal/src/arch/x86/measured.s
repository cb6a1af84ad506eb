# The guest that is measured: it writes a word to each of some pages, in order, and stores for each
# how far the time-stamp counter went between the instructions around the write.
#
# The same code runs on slat-metal and on KVM, in 64-bit mode, with a block of words at rdi:
#   0  the address of the first page
#   8  the number of pages, at least 1
#  16  the distance between pages, in bytes
#  24  unused
#  32  for each page, the difference
# Then it writes to port 0x10, and begins again. It is copied for KVM: it has no
# addresses.
#
# A turn of the loop has 14 instructions. The difference is 5 where the write does not leave the
# guest: shl, or, mov, the write, rdtsc.

.balign 128                             # in one page
.global measured_guest
measured_guest:
    mov rsi, [rdi]
    mov rcx, [rdi + 8]
    mov r10, [rdi + 16]
    lea r9, [rdi + 32]
2:  rdtsc
    shl rdx, 32
    or rax, rdx
    mov r8, rax
    mov [rsi], r8
    rdtsc
    shl rdx, 32
    or rax, rdx
    sub rax, r8
    mov [r9], rax
    add r9, 8
    add rsi, r10
    dec rcx
    jnz 2b
    out 0x10, al
    jmp measured_guest
.global measured_guest_end
measured_guest_end:
