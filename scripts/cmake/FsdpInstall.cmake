# Install rules: the library, the public headers, and a CMake package.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package "${CMAKE_INSTALL_LIBDIR}/cmake/fsdp")
# The library finds the LibTorch that it was built with; a program's own path to LibTorch comes first.
set_target_properties(fsdp PROPERTIES INSTALL_RPATH "$ORIGIN;${FSDP_TORCH_ROOT}/lib")
install(TARGETS fsdp EXPORT fsdpTargets)
if(TARGET fsdp_nccl)  # loaded by libfsdp, linked by nobody
  get_filename_component(cudart_folder "${FSDP_CUDART}" DIRECTORY)
  set_target_properties(fsdp_nccl PROPERTIES INSTALL_RPATH "${FSDP_TORCH_ROOT}/lib;${cudart_folder}")
  install(TARGETS fsdp_nccl)
endif()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/fsdp" TYPE INCLUDE FILES_MATCHING PATTERN "*.h")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" TYPE DOC)
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION "${package}")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/fsdpConfig.cmake.in" "${PROJECT_BINARY_DIR}/fsdpConfig.cmake"
                              INSTALL_DESTINATION "${package}")
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/fsdpConfig.cmake" "${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/FsdpTorch.cmake" DESTINATION "${package}")
