# From the boot loader to Rust, and from the start of another CPU to Rust.
#
# A multiboot loader enters `start32` in 32-bit protected mode without paging (Multiboot Specification
# 0.6.96, 3.2 "Machine state"). Other CPUs enter `trampoline` in real mode, at the page that the
# startup IPI names (AMD APM vol. 2, 15.27.8 and 16.9.4 "Startup"). Both map the first 4 GiB to
# themselves by pages of 2 MiB, turn on long mode and SSE, and call Rust on a stack of their own.

.set TRAMPOLINE, 0x8000
.set CODE64, 0x08
.set DATA, 0x10
.set CODE32, 0x18

.section .multiboot, "a"
.balign 4
multiboot_header:
    .long 0x1badb002
    .long 0x00010003                    # modules at page borders, memory map, addresses as below
    .long -(0x1badb002 + 0x00010003)
    .long multiboot_header
    .long image_start
    .long image_data_end
    .long image_end
    .long start32

.section .boot, "ax"
.balign 8
boot_gdt:
    .quad 0
    .quad 0x00af9a000000ffff            # code, 64 bits
    .quad 0x00cf92000000ffff            # data
    .quad 0x00cf9a000000ffff            # code, 32 bits
boot_gdt_end:
boot_gdt_pointer:
    .word boot_gdt_end - boot_gdt - 1
    .quad boot_gdt

.code32
.global start32
start32:
    cli
    cld
    cmp eax, 0x2badb002
    jne stop
    mov esi, ebx                        # multiboot information
    lgdt [boot_gdt_pointer]

    # The page tables: four page directories of 2 MiB pages, present and writable.
    mov edi, offset boot_directories
    mov eax, 0x83
    mov ecx, 2048
1:  mov dword ptr [edi], eax
    mov dword ptr [edi + 4], 0
    add eax, 0x200000
    add edi, 8
    dec ecx
    jnz 1b
    mov edi, offset boot_pdpt
    mov eax, offset boot_directories + 3
    mov ecx, 4
2:  mov dword ptr [edi], eax
    add eax, 0x1000
    add edi, 8
    dec ecx
    jnz 2b
    mov eax, offset boot_pdpt + 3
    mov dword ptr [boot_pml4], eax
    mov ebx, offset boot_cpu64
    jmp enter_long_mode

# Turns on paging, long mode and SSE, and jumps to ebx in 64-bit mode; esi stays.
enter_long_mode:
    mov eax, cr4
    or eax, 0x620                       # PAE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov eax, offset boot_pml4
    mov cr3, eax
    mov ecx, 0xc0000080                 # EFER
    rdmsr
    or eax, 0x900                       # LME, NXE
    wrmsr
    mov eax, cr0
    and eax, 0x9ffffffb                 # caches on, no emulation of the FPU
    or eax, 0x80010023                  # paging, write protection, NE, MP, protection
    mov cr0, eax
    .byte 0xea                          # jmp CODE64:long_mode
    .long long_mode
    .word CODE64
stop:
    hlt
    jmp stop

.code64
long_mode:
    mov eax, DATA
    mov ds, eax
    mov es, eax
    mov ss, eax
    xor eax, eax
    mov fs, eax
    mov gs, eax
    mov ebx, ebx
    jmp rbx

boot_cpu64:
    mov rsp, offset stacks + STACK_BYTES
    xor ebp, ebp
    mov edi, esi
    call boot_cpu_main
    ud2

# Its stack is that of the order in which CPUs come here.
other_cpu64:
    mov edi, 1
    lock xadd dword ptr [next_cpu], edi
    cmp edi, MAX_CPUS
    jae too_many
    lea rax, [rdi + 1]
    imul rax, rax, STACK_BYTES
    lea rsp, [rax + stacks]
    xor ebp, ebp
    call other_cpu_main
    ud2
too_many:
    hlt
    jmp too_many

# A copy of this is at TRAMPOLINE: labels in it are no addresses.
.code16
.balign 4
.global trampoline
trampoline:
    jmp 1f
.balign 4
    # TRAMPOLINE + 4
    .word boot_gdt_end - boot_gdt - 1
    .long boot_gdt
1:  cli
    cld
    xor ax, ax
    mov ds, ax
    lgdt [TRAMPOLINE + 4]
    mov eax, cr0
    or al, 1
    mov cr0, eax
    .byte 0x66, 0xea                    # jmp CODE32:protected_mode
    .long protected_mode
    .word CODE32
.global trampoline_end
trampoline_end:

.code32
protected_mode:
    mov eax, DATA
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov ebx, offset other_cpu64
    jmp enter_long_mode
.code64

.section .data.boot, "aw"
.balign 4
next_cpu:
    .long 1

.section .bss.boot, "aw", @nobits
.balign 4096
boot_pml4:
    .skip 4096
boot_pdpt:
    .skip 4096
boot_directories:
    .skip 4 * 4096
.global stacks
stacks:
    .skip MAX_CPUS * STACK_BYTES
